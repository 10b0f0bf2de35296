// The names of threads, and the number that can run at once.
#pragma once

#include <cstddef>

namespace datastates {

// Names the calling thread, for top and debuggers. At most 15 characters.
void NameThread(const char* name) noexcept;

// Counts the cores that the calling thread may run on; at least 1.
size_t UsableCores() noexcept;

}  // namespace datastates
