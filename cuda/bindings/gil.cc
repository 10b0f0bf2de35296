// Built without exceptions: an unwinder has nothing to do in this frame, and pthread_cleanup_push is that of
// C, by which glibc jumps to the frame and ends unwinding there.
#include "bindings/gil.h"

#include <pthread.h>
#include <unistd.h>

namespace datastates {
namespace {

void SleepForever(void*) {
  while (true) pause();
}

}  // namespace

void RestoreThread(PyThreadState* thread) {
  pthread_cleanup_push(SleepForever, nullptr);
  PyEval_RestoreThread(thread);
  pthread_cleanup_pop(0);
}

}  // namespace datastates
