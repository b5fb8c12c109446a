// Errors of base/error.h as the classes of hetkv.errors, with their fields.
#pragma once

namespace hetkv {

// Registers the translation for this module. The Python classes are looked up when the first error is raised.
void bind_errors();

}  // namespace hetkv
