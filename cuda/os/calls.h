// How calls on files are made: again after a signal, and without direct I/O once it is refused.
#pragma once

#include <fcntl.h>

#include <atomic>
#include <cerrno>

namespace datastates {

// Repeats a call until no signal interrupts it (network file systems may return EINTR for any signal). `call`
// returns an errno or 0, and so does this.
template <typename Call>
int Uninterrupted(Call call) {
  int code;
  do code = call();
  while (code == EINTR);
  return code;
}

inline int ErrorOf(int result) { return result < 0 ? errno : 0; }

// `direct` says whether the file `fd` is open for direct I/O; afterwards it is not.
inline void StopDirect(int fd, std::atomic<bool>* direct) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_DIRECT);
  *direct = false;
}

}  // namespace datastates
