// Where tensors are and what they are, through DLPack's exchange API: a C table that array libraries offer on
// their types (dlpack.h; torch 2.10 and newer), so that nothing here links to them.
#pragma once

#include <nanobind/nanobind.h>

namespace datastates {

// Returns (addresses, description, whether any is complex, whether any is a negated view) of torch tensors
// whose type offers `api`; addresses are an array of 64-bit words. Lists with equal descriptions have equal
// dtypes, devices, shapes and strides, tensor by tensor. With `storages`, (storages, their addresses) come
// after these. Looks at each tensor once: the trainer waits for this at every save, mostly for memory that no
// cache holds. Returns None if the API has another version, or one of the tensors cannot be described.
nanobind::object DescribeTensors(const nanobind::capsule& api, const nanobind::list& tensors, bool storages);

}  // namespace datastates
