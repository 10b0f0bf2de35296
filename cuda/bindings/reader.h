// The Python face of the reader.
#pragma once

#include <nanobind/nanobind.h>

namespace datastates {

void BindReader(nanobind::module_& module);

}  // namespace datastates
