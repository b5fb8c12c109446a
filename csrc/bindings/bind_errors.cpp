#include "bindings/bind_errors.h"

#include <pybind11/pybind11.h>

#include <exception>

#include "base/error.h"

namespace py = pybind11;

namespace hetkv {

namespace {

// Sets the Python error to an instance of hetkv.errors.`name`, made from its fields.
template <class... Fields>
void set_error(const char* name, const Fields&... fields) {
  const py::object type = py::module_::import("hetkv.errors").attr(name);
  const py::object error = type(fields...);
  PyErr_SetObject(type.ptr(), error.ptr());
}

void translate(std::exception_ptr pending) {
  if (!pending) return;
  try {
    std::rethrow_exception(std::move(pending));
  } catch (const ArgumentError& e) {
    set_error("ArgumentError", e.argument, e.value, e.expected);
  } catch (const LayoutError& e) {
    set_error("LayoutError", e.group, e.field, e.what());
  } catch (const RouteError& e) {
    set_error("RouteError", e.kind, e.operation);
  } catch (const AdmissionError& e) {
    set_error("AdmissionError", e.kind, e.need, e.cap, e.retryable, e.what());
  } catch (const StaleVersionError& e) {
    set_error("StaleVersionError", e.have, e.running);
  } catch (const PositionError& e) {
    set_error("PositionError", e.group, e.claimed, e.actual);
  } catch (const PendingError&) {
    set_error("PendingError");
  } catch (const NotClearedError& e) {
    set_error("NotClearedError", e.ranges);
  }
}

}  // namespace

void bind_errors() { py::register_local_exception_translator(&translate); }

}  // namespace hetkv
