#include "os/faults.h"

#include <signal.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>

namespace datastates {
namespace {

int ErrnoByName(const std::string& name) {
  static const std::map<std::string, int> kNames = {
      {"ENOSPC", ENOSPC}, {"EIO", EIO},       {"EINVAL", EINVAL},         {"EDQUOT", EDQUOT},
      {"EFBIG", EFBIG},   {"ENOMEM", ENOMEM}, {"EOPNOTSUPP", EOPNOTSUPP}, {"EINTR", EINTR},
      {"EXDEV", EXDEV},   {"EPERM", EPERM},   {"EMLINK", EMLINK},         {"ENOENT", ENOENT},
      {"EACCES", EACCES},
  };
  auto found = kNames.find(name);
  return found == kNames.end() ? 0 : found->second;
}

constexpr char kStall[] = "stall=";

std::optional<long> Number(const std::string& text) {
  long number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0) return std::nullopt;
  return number;
}

bool Known(const std::string& effect) {
  if (effect.rfind(kStall, 0) == 0) return Number(effect.substr(sizeof(kStall) - 1)).has_value();
  return effect == "short" || effect == "kill" || ErrnoByName(effect) != 0;
}

}  // namespace

Faults::Faults(const std::string& plan) {
  std::istringstream words(plan);
  for (std::string word; std::getline(words, word, ',');) {
    if (word.empty()) continue;
    const size_t first = word.find(':');
    const size_t second = word.find(':', first == std::string::npos ? first : first + 1);
    std::optional<long> nth;
    if (second != std::string::npos && Known(word.substr(second + 1))) {
      nth = Number(word.substr(first + 1, second - first - 1));
    }
    if (!nth) {
      throw Failure("read fault plan", "'" + word + "'", 0, "expected operation:nth:effect");
    }
    entries_.push_back({word.substr(0, first), *nth, word.substr(second + 1)});
  }
}

Faults::Effect Faults::Count(const char* operation) {
  Effect effect;
  if (entries_.empty()) return effect;
  long call;
  {
    const MutexLock lock(mutex_);
    call = ++calls_[operation];
  }
  for (const Entry& entry : entries_) {
    if (entry.operation != operation || (entry.nth != 0 && entry.nth != call)) continue;
    if (entry.effect == "kill") kill(getpid(), SIGKILL);
    if (entry.effect == "short") effect.short_count = true;
    if (entry.effect.rfind(kStall, 0) == 0) {
      const long milliseconds = *Number(entry.effect.substr(sizeof(kStall) - 1));
      std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    }
    if (int code = ErrnoByName(entry.effect)) effect.error = code;
  }
  return effect;
}

}  // namespace datastates
