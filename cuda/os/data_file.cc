#include "os/data_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <filesystem>

#include "os/aligned.h"
#include "os/calls.h"

namespace datastates {
namespace {

namespace fs = std::filesystem;

// Returns false if the file system reports that direct I/O on this file needs more than kAlignment. Kernels
// before 6.1 report nothing; then the first write decides.
bool DirectIoFits(int fd) {
#ifdef STATX_DIOALIGN
  struct statx facts{};
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &facts) == 0 && (facts.stx_mask & STATX_DIOALIGN)) {
    return facts.stx_dio_offset_align != 0 && facts.stx_dio_offset_align <= kAlignment &&
           facts.stx_dio_mem_align <= kAlignment;
  }
#else
  (void)fd;
#endif
  return true;
}

}  // namespace

DataFile::DataFile(const std::string& path, bool direct, bool discard, Faults* faults)
    : path_(path), discard_(discard), faults_(faults), direct_(direct) {
  MakeDirectories();
  int code = Open(direct_ ? O_DIRECT : 0);
  if (code == EINVAL && direct_) {
    // Some file systems create the file before they refuse the flag.
    unlink(path_.c_str());
    direct_ = false;
    code = Open(0);
  }
  if (code != 0) Throw("open", code);
  try {
    CloseInForkedChildOrNow(fd_);
  } catch (const std::bad_alloc&) {
    unlink(path_.c_str());  // made above, and nobody else will remove it
    throw;
  }
  if (direct_ && !DirectIoFits(fd_)) StopDirect(fd_, &direct_);
}

int DataFile::Open(int flags) {
  bool interrupted = false;
  return Uninterrupted([&] {
    int code = faults_->Count("open").error;
    const auto open_with = [&](int more) {
      fd_ = open(path_.c_str(), flags | more | O_WRONLY | O_CLOEXEC, 0666);
      code = ErrorOf(fd_);
    };
    if (code == 0) open_with(O_CREAT | O_EXCL);
    // A call that was interrupted may have made the file. Names are random, so an empty file is ours.
    std::error_code unknown;
    if (code == EEXIST && interrupted && fs::file_size(path_, unknown) == 0) open_with(0);
    interrupted = interrupted || code == EINTR;
    return code;
  });
}

DataFile::~DataFile() {
  if (fd_ < 0 || !home_.IsHere()) return;
  ForgetDescriptor(fd_);
  close(fd_);
}

// To open a file, a client of NFS asks the server.
bool DataFile::IsAtItsName() const {
  struct stat own{}, named{};
  const int opened = open(path_.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  const int found = opened < 0 ? lstat(path_.c_str(), &named) : fstat(opened, &named);
  if (opened >= 0) close(opened);
  return found == 0 && fstat(fd_, &own) == 0 && own.st_dev == named.st_dev && own.st_ino == named.st_ino;
}

void DataFile::MakeDirectories() {
  std::error_code code;
  const auto check = [&code](const fs::path& path) {
    if (code) throw FileFailure("make directory", path.string(), code.value());
  };
  const fs::path file = fs::absolute(path_, code);
  check(path_);
  const fs::path directory = file.parent_path();
  std::vector<fs::path> missing;
  for (fs::path at = directory; !fs::exists(at, code); at = at.parent_path()) {
    check(at);
    missing.push_back(at);
  }
  for (; !missing.empty(); missing.pop_back()) {
    // A new directory's entry is in its parent, which whoever makes the directory syncs.
    if (fs::create_directory(missing.back(), code)) {
      directories_.insert(directories_.begin(), missing.back().parent_path().string());
    }
    check(missing.back());
  }
  directories_.insert(directories_.begin(), directory.string());
  fs::create_directories(directory, code);  // an error, if it is something else
  check(directory);
}

template <typename Call>
int DataFile::Attempt(const char* operation, Call call) {
  return Uninterrupted([&] {
    const int injected = faults_->Count(operation).error;
    return injected != 0 ? injected : call();
  });
}

void DataFile::Reserve(uint64_t bytes) {
  if (discard_) return;
  const std::string need = "needs " + std::to_string(bytes) + " bytes";
  const int code = Attempt(
      "reserve", [&] { return bytes == 0 ? 0 : ErrorOf(fallocate(fd_, 0, 0, static_cast<off_t>(bytes))); });
  if (code == 0) return;
  for (const int lacking : {ENOSPC, EDQUOT, EFBIG, EIO, ENOMEM}) {
    if (code == lacking) throw FileFailure("reserve", path_, code, need);
  }
  // Not every file system can reserve space, and they say so in many ways (EOPNOTSUPP, ENOSYS, EPERM, 524);
  // then its free space is the best estimate.
  struct statvfs facts{};
  if (fstatvfs(fd_, &facts) == 0 && facts.f_blocks != 0 &&
      static_cast<uint64_t>(facts.f_bavail) * facts.f_frsize < bytes) {
    throw FileFailure("reserve", path_, ENOSPC, need);
  }
}

void DataFile::WriteAt(const uint8_t* data, uint64_t bytes, uint64_t offset) {
  uint64_t done = 0;
  while (done < bytes) {
    const bool direct = direct_;  // for this call: another thread may clear direct_ meanwhile
    const Faults::Effect effect = faults_->Count("write");
    uint64_t wanted = bytes - done;
    if (effect.short_count) wanted = direct ? AlignUp(wanted / 2, kAlignment) : wanted / 2 | 1;
    errno = effect.error;
    ssize_t wrote = effect.error ? -1 : static_cast<ssize_t>(wanted);
    if (wrote > 0 && !discard_) wrote = pwrite(fd_, data + done, wanted, static_cast<off_t>(offset + done));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0 && errno == EINVAL && direct) {
      StopDirect(fd_, &direct_);
      continue;
    }
    if (wrote < 0) Throw("write", errno);
    if (wrote == 0) Throw("write", ENOSPC);
    // A short write may end at an unaligned offset, where no direct write can begin.
    if (static_cast<uint64_t>(wrote) % kAlignment != 0) StopDirect(fd_, &direct_);
    done += static_cast<uint64_t>(wrote);
  }
  if (!direct_)
    sync_file_range(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), SYNC_FILE_RANGE_WRITE);
}

void DataFile::Truncate(uint64_t bytes) {
  const int code = Attempt("truncate", [&] { return ErrorOf(ftruncate(fd_, static_cast<off_t>(bytes))); });
  if (code != 0) Throw("truncate", code);
}

void DataFile::Sync() {
  const int code = Attempt("sync", [&] { return ErrorOf(fsync(fd_)); });
  if (code != 0) Throw("sync", code);
  for (const std::string& directory : directories_) SyncDirectory(directory);
}

void DataFile::SyncDirectory(const std::string& directory) {
  int fd = -1;
  const int opened = Uninterrupted([&] {
    fd = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return ErrorOf(fd);
  });
  if (opened != 0) throw FileFailure("open directory", directory, opened);
  CloseInForkedChildOrNow(fd);
  const int code = Attempt("sync directory", [&] { return ErrorOf(fsync(fd)); });
  ForgetDescriptor(fd);
  close(fd);
  // Some network file systems refuse to sync a directory; their metadata is synchronous.
  if (code != 0 && code != EINVAL && code != EBADF) throw FileFailure("sync directory", directory, code);
}

void DataFile::Throw(const char* operation, int code) const { throw FileFailure(operation, path_, code); }

}  // namespace datastates
