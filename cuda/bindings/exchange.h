// Addresses and descriptions of tensors, through DLPack's exchange API: a C table that array libraries offer
// on their types (dlpack.h; torch 2.10 and newer), so that nothing here links to them.
#pragma once

#include <nanobind/nanobind.h>

namespace datastates {

// Returns (addresses as 64-bit words, description, whether any is complex) of tensors whose type offers
// `api`. Lists with equal descriptions have equal dtypes, devices, shapes and strides, tensor by tensor.
// Returns None if the API has another version or cannot describe one of the tensors.
nanobind::object DescribeTensors(const nanobind::capsule& api, const nanobind::list& tensors);

}  // namespace datastates
