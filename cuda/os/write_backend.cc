#include "os/write_backend.h"

#include <unistd.h>

#include "common.h"

namespace datastates {
namespace {

class Pwrite : public WriteBackend {
 public:
  ssize_t Write(int fd, const uint8_t* data, size_t bytes, off_t offset) override {
    return pwrite(fd, data, bytes, offset);
  }
};

class Discard : public WriteBackend {
 public:
  ssize_t Write(int, const uint8_t*, size_t bytes, off_t) override { return static_cast<ssize_t>(bytes); }
  bool Keeps() const override { return false; }
};

}  // namespace

WriteBackend* WriteBackend::Named(const std::string& name) {
  static Pwrite pwrite_backend;
  static Discard discard_backend;
  if (name == "pwrite") return &pwrite_backend;
  if (name == "discard") return &discard_backend;
  throw Failure("choose write back end", name, 0, "there is no such back end; expected pwrite");
}

std::vector<std::string> WriteBackend::Names() { return {"pwrite"}; }

}  // namespace datastates
