// Where tensors are and what they are, through DLPack's exchange API: a C table that array libraries offer on
// their types (dlpack.h; torch 2.10 and newer), so that nothing here links to them.
#pragma once

#include <nanobind/nanobind.h>

namespace datastates {

// Returns (addresses as an array of 64-bit words, description, whether any is complex, whether `is_neg` is
// true of any, what `storage_of` returns of each) of tensors whose type offers `api`. Lists with equal
// descriptions have equal dtypes, devices, shapes and strides, tensor by tensor. `storage_of` may be None.
// Looks at each tensor once: the trainer waits for this at every save, mostly for memory that no cache holds.
// Returns None if the API has another version, or one of the tensors cannot be described.
nanobind::object DescribeTensors(const nanobind::capsule& api, const nanobind::list& tensors,
                                 nanobind::handle is_neg, nanobind::handle storage_of);

// Returns (addresses, storages), as DescribeTensors does, of tensors that are what they were: of these types,
// with this description. Returns None if one is not, or is negated. `is_neg` is called only for tensors
// that are not at their `known` address: torch releases the GIL in it, and a thread that takes the GIL then
// keeps it for milliseconds, which thousands of tensors would repeat.
nanobind::object LocateTensors(const nanobind::capsule& api, const nanobind::list& tensors,
                               const nanobind::list& types, const nanobind::bytes& description,
                               const nanobind::bytes& known, nanobind::handle is_neg,
                               nanobind::handle storage_of);

// Returns (addresses, sizes in bytes) of storages, as arrays of 64-bit words. `address_of` returns the
// address of one; the size is its length in Python. Raises what `address_of` raises.
nanobind::object MeasureStorages(const nanobind::list& storages, nanobind::handle address_of);

}  // namespace datastates
