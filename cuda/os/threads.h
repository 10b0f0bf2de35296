// The names of threads, who handles signals, the number that can run at once, and which of two gets a core.
#pragma once

#include <cstddef>

namespace datastates {

// Called first by every thread that is started here. Names it, for top and debuggers, with at most 15
// characters. Leaves signals to the program's own threads, but for those of faults: one that the program
// waits for in sigwait would end the process, and those of a profiler's timer would interrupt a call again
// and again that then begins anew, such as fallocate in tmpfs of many kernels.
void BeginThread(const char* name) noexcept;

// From now on the calling thread does not take the core of a thread that wakes it: where all cores are busy,
// the trainer ends its poll first. It keeps its share of the cores.
void YieldToWakers() noexcept;

// Counts the cores that the calling thread may run on; at least 1.
size_t UsableCores() noexcept;

}  // namespace datastates
