// The Python exception for a Failure: NativeError, which is an OSError.
#pragma once

#include <nanobind/nanobind.h>

#include "common.h"

namespace datastates {

// Creates the exception type, and has every Failure that leaves native code raised as it.
void BindFailure(nanobind::module_& module);

// Returns the exception for `failure`, to be raised or passed on as a value.
nanobind::object ErrorOf(const Failure& failure);

}  // namespace datastates
