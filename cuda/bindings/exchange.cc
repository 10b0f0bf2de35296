#include "bindings/exchange.h"

#include <nanobind/ndarray.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
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

// Returns the function that describes tensors; null if the table is of another version.
auto Describer(const nb::capsule& api) {
  const auto* table = static_cast<const ExchangeApi*>(api.data("dlpack_exchange_api"));
  return table->header.major == kMajorVersion ? table->describe : nullptr;
}

// Describes a tensor. Returns false, and leaves no exception behind, if that is not possible.
bool Describe(decltype(ExchangeApi::describe) describe, nb::handle tensor, nb::dlpack::dltensor* facts) {
  if (describe(tensor.ptr(), facts) != 0) {
    PyErr_Clear();
    return false;
  }
  return facts->ndim == 0 || facts->strides != nullptr;
}

uint64_t Address(const nb::dlpack::dltensor& facts) {
  return reinterpret_cast<uint64_t>(facts.data) + facts.byte_offset;
}

// Calls `visit` with each piece of what a tensor is. Stops, and returns false, where that returns false.
template <typename Visit>
bool VisitFacts(const nb::dlpack::dltensor& facts, Visit&& visit) {
  return visit(&facts.device, sizeof facts.device) && visit(&facts.dtype, sizeof facts.dtype) &&
         visit(&facts.ndim, sizeof facts.ndim) && visit(facts.shape, sizeof(int64_t) * facts.ndim) &&
         visit(facts.strides, sizeof(int64_t) * facts.ndim);
}

}  // namespace

nb::object DescribeTensors(const nb::capsule& api, const nb::list& tensors, nb::handle is_neg,
                           nb::handle storage_of) {
  const auto describe = Describer(api);
  if (describe == nullptr) return nb::none();
  std::vector<uint64_t> addresses;
  addresses.reserve(tensors.size());
  std::string description;
  const auto append = [&](const void* data, size_t bytes) {
    description.append(static_cast<const char*>(data), bytes);
    return true;
  };
  nb::list storages;
  bool has_complex = false, has_negative = false;
  for (nb::handle tensor : tensors) {
    // First: torch releases the GIL for it, and another thread may give the tensor other memory meanwhile.
    // The address and the storage are of the same memory.
    const nb::object negative = Call(is_neg, tensor);
    if (!negative.is_valid()) return nb::none();
    has_negative |= negative.ptr() != Py_False;
    nb::dlpack::dltensor facts;
    if (!Describe(describe, tensor, &facts)) return nb::none();
    addresses.push_back(Address(facts));
    has_complex |= facts.dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Complex);
    VisitFacts(facts, append);
    if (storage_of.is_none()) continue;
    const nb::object storage = Call(storage_of, tensor);
    if (!storage.is_valid()) return nb::none();
    storages.append(storage);
  }
  return nb::make_tuple(nb::bytes(addresses.data(), addresses.size() * sizeof(uint64_t)),
                        nb::bytes(description.data(), description.size()), has_complex, has_negative,
                        storages);
}

nb::object LocateTensors(const nb::capsule& api, const nb::list& tensors, const nb::list& types,
                         const nb::bytes& description, const nb::bytes& known, nb::handle is_neg,
                         nb::handle storage_of) {
  const auto describe = Describer(api);
  const size_t count = tensors.size();
  if (describe == nullptr || types.size() != count || known.size() != count * sizeof(uint64_t))
    return nb::none();
  const char* expected = description.c_str();
  const char* end = expected + description.size();
  const auto matches = [&](const void* data, size_t bytes) {
    if (static_cast<size_t>(end - expected) < bytes) return false;
    if (bytes > 0 && std::memcmp(expected, data, bytes) != 0) return false;
    expected += bytes;
    return true;
  };
  std::vector<uint64_t> addresses(count);
  std::memcpy(addresses.data(), known.c_str(), known.size());
  std::vector<nb::object> storages;
  storages.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    PyObject* const tensor = PyList_GET_ITEM(tensors.ptr(), i);
    nb::dlpack::dltensor facts;
    if (static_cast<void*>(Py_TYPE(tensor)) != PyList_GET_ITEM(types.ptr(), i) ||
        !Describe(describe, tensor, &facts))
      return nb::none();
    if (Address(facts) != addresses[i]) {
      const nb::object negative = Call(is_neg, tensor);
      if (!negative.is_valid() || negative.ptr() != Py_False) return nb::none();
      if (!Describe(describe, tensor, &facts)) return nb::none();  // again: torch has released the GIL
      addresses[i] = Address(facts);
    }
    if (!VisitFacts(facts, matches)) return nb::none();
    nb::object storage = Call(storage_of, tensor);
    if (!storage.is_valid()) return nb::none();
    storages.push_back(std::move(storage));
  }
  if (expected != end) return nb::none();
  // Made at the end: Python sees lists that lack items, while torch runs other threads.
  nb::object found = nb::steal(PyList_New(static_cast<Py_ssize_t>(count)));
  if (!found.is_valid()) throw nb::python_error();
  for (size_t i = 0; i < count; ++i) PyList_SET_ITEM(found.ptr(), i, storages[i].release().ptr());
  return nb::make_tuple(nb::bytes(addresses.data(), addresses.size() * sizeof(uint64_t)), found);
}

nb::object MeasureStorages(const nb::list& storages, nb::handle address_of) {
  std::vector<uint64_t> addresses, sizes;
  addresses.reserve(storages.size());
  sizes.reserve(storages.size());
  for (nb::handle storage : storages) {
    const Py_ssize_t bytes = PyObject_Size(storage.ptr());
    if (bytes < 0) throw nb::python_error();
    const nb::object address = nb::steal(PyObject_CallOneArg(address_of.ptr(), storage.ptr()));
    if (!address.is_valid()) throw nb::python_error();
    sizes.push_back(static_cast<uint64_t>(bytes));
    addresses.push_back(nb::cast<uint64_t>(address));
  }
  return nb::make_tuple(nb::bytes(addresses.data(), addresses.size() * sizeof(uint64_t)),
                        nb::bytes(sizes.data(), sizes.size() * sizeof(uint64_t)));
}

}  // namespace datastates
