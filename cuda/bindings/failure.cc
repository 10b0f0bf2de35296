#include "bindings/failure.h"

#include <nanobind/stl/string.h>

namespace datastates {
namespace nb = nanobind;
namespace {

PyObject* error_type = nullptr;  // constant once the module is imported

}  // namespace

nb::object ErrorOf(const Failure& failure) {
  // OSError(errno, text): code 0 means that no system call failed.
  nb::object error = nb::borrow(error_type)(failure.code, failure.what());
  error.attr("path") = failure.path;
  error.attr("operation") = failure.operation;
  return error;
}

void BindFailure(nb::module_& module) {
  error_type = PyErr_NewException("megatron_datastates.engine._native.NativeError", PyExc_OSError, nullptr);
  if (error_type == nullptr) throw nb::python_error();
  nb::object type = nb::borrow(error_type);
  type.attr("path") = "";
  type.attr("operation") = "";
  module.attr("NativeError") = type;
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Failure& failure) {
      PyErr_SetObject(error_type, ErrorOf(failure).ptr());
    }
  });
}

}  // namespace datastates
