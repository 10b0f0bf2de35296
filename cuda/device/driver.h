// The CUDA driver, opened at run time, so that one build of this library works with and without a GPU.
//
// Only the calls that saving and loading need belong here, with no policy of their own. Every function is
// looked up with the signature of one named CUDA version (cuGetProcAddress), because the newest signatures
// differ between 12.8 and 13.0. Constants are those of cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common.h"

namespace datastates {

using CuContext = void*;
using CuStream = void*;
using CuEvent = void*;
using CuPointer = unsigned long long;

// The error of a call after which, by cuda.h, the context or the process cannot be used any more. Nothing
// that was enqueued touches memory from then on.
class ContextLost : public Failure {
 public:
  using Failure::Failure;
};

class Driver {
 public:
  // Opens the library `path` (a test may name a fake one). Throws a Failure that says what to do.
  static std::shared_ptr<Driver> Open(const std::string& path);

  CuContext CurrentContext() const;  // of this thread; null if it has none
  // Returns this thread's context; where it has none, makes that of device 0 its own. CUDA's runtime does the
  // same at its first call in a thread, so that torch's tensors of such a thread are on device 0.
  CuContext EnterContext() const;
  int CurrentDevice() const;  // its number, in this thread's context
  // Returns that device's PCI bus id, such as "0000:0A:00.0"; empty if the driver does not know it.
  std::string CurrentBusId() const noexcept;
  void SetContext(CuContext context) const;
  // Makes `context` current and returns the previous one.
  CuContext SwapContext(CuContext context) const noexcept;
  // Lets this thread call the driver while another thread captures a CUDA graph.
  void RelaxCapture() const;
  int SwapCaptureMode(int mode) const noexcept;  // returns the previous one

  CuStream CreateLowPriorityStream() const;
  CuEvent CreateEvent(bool timing = false) const;
  void DestroyStream(CuStream stream) const noexcept;
  void DestroyEvent(CuEvent event) const noexcept;
  void Record(CuEvent event, CuStream stream) const;
  void StreamWait(CuStream stream, CuEvent event) const;
  void Synchronize(CuEvent event) const;  // sleeps, does not spin
  bool Done(CuEvent event) const;
  float MillisecondsBetween(CuEvent begin, CuEvent end) const;  // both made with `timing`, and both done
  void CopyToHost(void* target, CuPointer source, size_t bytes, CuStream stream) const;
  // CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device so far
  static constexpr size_t kMostPitch = (size_t{1} << 31) - 1;
  // Copies `rows` of `row_bytes`, `pitch` apart on the device, to contiguous memory. row_bytes <= pitch <=
  // kMostPitch.
  void CopyRowsToHost(void* target, CuPointer source, size_t row_bytes, size_t pitch, size_t rows,
                      CuStream stream) const;
  void CopyToDevice(CuPointer target, const void* source, size_t bytes, CuStream stream) const;
  // Copies `rows` of `row_bytes`; either pitch is the distance of rows. row_bytes <= pitch <= kMostPitch.
  void CopyRowsToDevice(CuPointer target, size_t target_pitch, const void* source, size_t source_pitch,
                        size_t row_bytes, size_t rows, CuStream stream) const;
  void RegisterHost(void* memory, size_t bytes) const;
  // Returns whether it is done; if not, the memory must stay mapped: the driver still takes it for its own.
  bool UnregisterHost(void* memory) const noexcept;

 private:
  struct Table;
  explicit Driver(std::unique_ptr<Table> table);
  void Check(int result, const char* call) const;
  void CheckCopy(int result, const char* call) const;

  std::shared_ptr<Table> table_;  // constant after construction; the library is never closed
};

// Makes a context current on this thread for its lifetime: any thread may drop the driver's objects, and the
// calls that free them need their context.
class ContextScope {
 public:
  ContextScope(const Driver& driver, CuContext context) noexcept
      : driver_(driver), before_(driver.SwapContext(context)) {}
  ~ContextScope() { driver_.SwapContext(before_); }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const Driver& driver_;
  const CuContext before_;
};

// RelaxCapture for its lifetime, on a thread of the trainer's.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) noexcept;
  ~RelaxedCapture() { driver_.SwapCaptureMode(before_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  const int before_;
};

}  // namespace datastates
