#include "os/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/aligned.h"
#include "os/calls.h"
#include "os/fork.h"

namespace datastates {

InputFile::InputFile(const std::string& path, bool direct, Faults* faults)
    : path_(path), faults_(faults), direct_(direct) {
  if (!direct || Open(O_DIRECT) != 0) {
    direct_ = false;
    if (const int code = Open(0)) throw FileFailure("open", path, code);
  }
  CloseInForkedChildOrNow(fd_);
  struct stat found;
  const int error = fstat(fd_, &found) == 0 ? 0 : errno;
  if (error != 0 || !S_ISREG(found.st_mode)) {
    ForgetDescriptor(fd_);
    close(fd_);
    const char* detail = error == 0 ? "expected a regular file, found another kind of file" : "";
    throw FileFailure("open", path, error, detail);
  }
}

int InputFile::Open(int flags) {
  return Uninterrupted([&] {
    if (const int code = faults_->Count("open").error) return code;
    // Without O_NONBLOCK, opening a pipe would wait for a writer.
    const int all = flags | O_RDONLY | O_CLOEXEC | O_NOCTTY;
    fd_ = open(path_.c_str(), all | O_NONBLOCK);
    // A regular file, on which another process has a lease, such as a server of NFS or Samba. The system has
    // asked for it back, and waits for at most 45 seconds (lease-break-time in /proc/sys/fs).
    if (fd_ < 0 && errno == EWOULDBLOCK) fd_ = open(path_.c_str(), all);
    return ErrorOf(fd_);
  });
}

InputFile::~InputFile() {
  ForgetDescriptor(fd_);
  close(fd_);
}

void InputFile::ReadAt(uint8_t* buffer, uint64_t begin, uint64_t end) {
  for (uint64_t at = begin; at < end;) {
    const bool direct = direct_;  // for this call: another thread may clear direct_ meanwhile
    const Faults::Effect effect = faults_->Count("read");
    // A direct read asks for all that the buffer has room for. Where a short one ended at an unaligned
    // offset, most file systems refuse the next (EINVAL below); some accept it, such as NFS.
    uint64_t wanted = direct ? begin + AlignUp(end - begin, kAlignment) - at : end - at;
    if (effect.short_count) wanted = direct ? AlignUp(wanted / 2, kAlignment) : wanted / 2 | 1;
    errno = effect.error;
    const ssize_t got = effect.error ? -1 : pread(fd_, buffer + (at - begin), wanted, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL && direct) {
      StopDirect(fd_, &direct_);
      continue;
    }
    const std::string where = "at offset " + std::to_string(at);
    if (got < 0) throw FileFailure("read", path_, errno, where);
    if (got == 0) {
      throw FileFailure("read", path_, 0,
                        "the file ends " + where + ", before its data does: it was truncated");
    }
    at += static_cast<uint64_t>(got);
  }
}

}  // namespace datastates
