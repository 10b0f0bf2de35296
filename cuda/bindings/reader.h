// The Python bindings of the reader: parse, release the GIL, call.
#pragma once

#include <nanobind/nanobind.h>

namespace datastates {

void BindReader(nanobind::module_& module);

}  // namespace datastates
