#include "bindings/exchange.h"

#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

namespace nb = nanobind;

namespace datastates {
namespace {

constexpr uint32_t kMajorVersion = 1;  // of the table below

// As in dlpack.h 1.3: the header never changes, the rest only with the major version.
struct ExchangeApi {
  struct Header {
    uint32_t major, minor;
    Header* previous;
  } header;
  void* unused[3];  // functions that transfer ownership
  int (*describe)(void* tensor, nb::dlpack::dltensor* out);
  void* current_work_stream;
};

// Calls a function of one argument. Returns an invalid object, and leaves no exception behind, if it fails.
nb::object Call(nb::handle function, nb::handle argument) {
  nb::object result = nb::steal(PyObject_CallOneArg(function.ptr(), argument.ptr()));
  if (!result.is_valid()) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();
    PyErr_Clear();
  }
  return result;
}

void Append(std::string* text, const void* data, size_t bytes) {
  text->append(static_cast<const char*>(data), bytes);
}

}  // namespace

nb::object DescribeTensors(const nb::capsule& api, const nb::list& tensors, nb::handle is_neg,
                           nb::handle storage_of) {
  const auto* table = static_cast<const ExchangeApi*>(api.data("dlpack_exchange_api"));
  if (table->header.major != kMajorVersion || table->describe == nullptr) return nb::none();
  std::vector<uint64_t> addresses;
  addresses.reserve(tensors.size());
  std::string description;
  nb::list storages;
  bool has_complex = false, has_negative = false;
  for (nb::handle tensor : tensors) {
    nb::dlpack::dltensor facts;
    if (table->describe(tensor.ptr(), &facts) != 0) {
      PyErr_Clear();
      return nb::none();
    }
    if (facts.ndim > 0 && facts.strides == nullptr) return nb::none();
    addresses.push_back(reinterpret_cast<uint64_t>(facts.data) + facts.byte_offset);
    has_complex |= facts.dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Complex);
    Append(&description, &facts.device, sizeof facts.device);
    Append(&description, &facts.dtype, sizeof facts.dtype);
    Append(&description, &facts.ndim, sizeof facts.ndim);
    Append(&description, facts.shape, sizeof(int64_t) * facts.ndim);
    Append(&description, facts.strides, sizeof(int64_t) * facts.ndim);
    const nb::object negative = Call(is_neg, tensor);
    if (!negative.is_valid()) return nb::none();
    has_negative |= negative.ptr() != Py_False;
    if (storage_of.is_none()) continue;
    const nb::object storage = Call(storage_of, tensor);
    if (!storage.is_valid()) return nb::none();
    storages.append(storage);
  }
  return nb::make_tuple(nb::bytes(addresses.data(), addresses.size() * sizeof(uint64_t)),
                        nb::bytes(description.data(), description.size()), has_complex, has_negative,
                        storages);
}

}  // namespace datastates
