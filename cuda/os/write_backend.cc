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

}  // namespace

WriteBackend* WriteBackend::Named(const std::string& name) {
  static Pwrite pwrite_backend;
  if (name == "pwrite") return &pwrite_backend;
  throw Failure("choose write back end", name, 0, "there is no such back end; there is pwrite");
}

std::vector<std::string> WriteBackend::Names() { return {"pwrite"}; }

}  // namespace datastates
