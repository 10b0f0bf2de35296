// The scope in which a thread of Python's runs native code without the GIL.
#pragma once

#include <Python.h>

namespace datastates {

// PyEval_RestoreThread, but for a thread that wants the GIL back while the interpreter ends, such as a daemon
// thread that loads. Before 3.14, Python ends it by pthread_exit, which unwinds its stack: a destructor on it
// aborts the process, and in a wheel, with an unwinder of its own, any frame of C++ crashes it. So it sleeps
// here until the process is over, as it does in 3.14.
void RestoreThread(PyThreadState* thread);

// Releases the GIL for its lifetime, as nanobind::gil_scoped_release.
class WithoutGil {
 public:
  WithoutGil() noexcept : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() { RestoreThread(thread_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const thread_;
};

}  // namespace datastates
