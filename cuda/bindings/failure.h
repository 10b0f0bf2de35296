// A Failure as Python sees it: a NativeError, which is an OSError.
#pragma once

#include <nanobind/nanobind.h>

#include "common.h"

namespace datastates {

// Makes the exception type, which every Failure that leaves native code is raised as.
void BindFailure(nanobind::module_& module);

// The exception that stands for `failure`, to be raised or handed over as a value.
nanobind::object ErrorOf(const Failure& failure);

}  // namespace datastates
