#include "bindings/failure.h"

#include <nanobind/stl/string.h>

#include <string>

namespace datastates {
namespace nb = nanobind;
namespace {

PyObject* error_type = nullptr;  // constant once the module is imported

// Decodes as Python decodes paths: a text may contain one, which need not be UTF-8.
nb::object Decode(const std::string& text) {
  PyObject* const made = PyUnicode_DecodeFSDefaultAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

}  // namespace

nb::object ErrorOf(const Failure& failure) {
  // OSError(errno, text): code 0 means that no system call failed.
  nb::object error = nb::borrow(error_type)(failure.code, Decode(failure.what()));
  error.attr("path") = Decode(failure.path);
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
