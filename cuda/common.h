// The error type, which every folder of the native core shares. Nothing else belongs here.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace datastates {

// A failed call of the system, the driver or the disk. `code` is the errno, or 0 if there is none. `path` is
// the checkpoint file that the call concerned; empty if there was none.
class Failure : public std::runtime_error {
 public:
  Failure(std::string operation, std::string object, int code, const std::string& detail = "")
      : std::runtime_error(Describe(operation, object, code, detail)),
        operation(std::move(operation)),
        object(std::move(object)),
        code(code) {}

  std::string operation;
  std::string object;
  std::string path;
  int code;

 private:
  static std::string Describe(const std::string& operation, const std::string& object, int code,
                              const std::string& detail) {
    std::string text = operation;
    if (!object.empty()) text += " " + object;
    if (!detail.empty()) text += ": " + detail;
    if (code != 0) text += std::string(": ") + std::strerror(code) + " (errno " + std::to_string(code) + ")";
    return text;
  }
};

inline Failure FileFailure(std::string operation, const std::string& path, int code,
                           const std::string& detail = "") {
  Failure failure(std::move(operation), path, code, detail);
  failure.path = path;
  return failure;
}

}  // namespace datastates
