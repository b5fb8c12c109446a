// A Refusal as the exception that Python expects.
#pragma once

#include "allocator/layout.h"
#include "allocator/sequence.h"

namespace hetkv {

// Throws AdmissionError with kind, need and cap if `refusal` is one; else does nothing. `operation` is named in the message.
void throw_if_refused(const Refusal& refusal, const CacheLayout& layout, const char* operation);

}  // namespace hetkv
