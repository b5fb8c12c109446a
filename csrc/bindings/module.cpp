// hetkv._core: the allocator for Python. The facade in python/hetkv wraps it; users import hetkv.
#include <pybind11/pybind11.h>

#include "bindings/bind_allocator.h"
#include "bindings/bind_errors.h"
#include "bindings/bind_layout.h"
#include "bindings/bind_sequence.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "The allocator core of hetkv. Use the facade, hetkv.Cache.";
  hetkv::bind_errors();
  hetkv::bind_layout(m);
  hetkv::bind_sequence(m);
  hetkv::bind_allocator(m);
}
