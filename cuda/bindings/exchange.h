// What tensors look like and where they are, through DLPack's exchange API: a C table that array libraries
// offer on their types (dlpack.h; torch 2.10 and newer), so that nothing here links to them.
#pragma once

#include <nanobind/nanobind.h>

namespace datastates {

// Of a list of tensors whose type gave `api`: (addresses as 64-bit words, description, whether one of them is
// complex). Two lists with equal descriptions have equal dtypes, devices, shapes and strides, one by one.
// None where the API is of another version, or cannot describe one of the tensors.
nanobind::object DescribeTensors(const nanobind::capsule& api, const nanobind::list& tensors);

}  // namespace datastates
