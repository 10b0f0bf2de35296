// The scope in which a thread of Python's runs native code without the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace datastates {

// Releases the GIL for its lifetime. As nanobind::gil_scoped_release, but for a thread that wants the GIL
// back while the interpreter ends, such as a daemon thread that loads: before 3.14, Python ends it by
// pthread_exit, which aborts the process, because it unwinds past a destructor. So it sleeps here until the
// process is over, as it does in 3.14.
class WithoutGil {
 public:
  WithoutGil() noexcept : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (...) {  // no exception, but the end of this thread
      while (true) pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const thread_;
};

}  // namespace datastates
