// The CUDA driver, opened at run time: one build of this library runs with and without a GPU.
//
// Every function is asked for with the signature of one named CUDA version (cuGetProcAddress), because
// the newest signatures differ between 12.8 and 13.0. Only what saving and loading need is here. Constants
// are those of cuda.h.
#pragma once

#include <atomic>
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

class Driver {
 public:
  // Opens the library `path` (a test may name a fake one). Throws Failure with what to do about it.
  static std::shared_ptr<Driver> Open(const std::string& path);

  CuContext CurrentContext() const;
  int CurrentDevice() const;  // its number, in this thread's context
  // Where that device is on the PCI bus, as in "0000:0A:00.0"; empty where the driver does not say.
  std::string CurrentBusId() const noexcept;
  void SetContext(CuContext context) const;
  // Makes `context` current and gives the one before.
  CuContext SwapContext(CuContext context) const noexcept;
  // Lets this thread call the driver while another thread captures a CUDA graph.
  void RelaxCapture() const;
  int SwapCaptureMode(int mode) const noexcept;  // gives the one before

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
  // CU_DEVICE_ATTRIBUTE_MAX_PITCH, of every device there has been.
  static constexpr size_t kMostPitch = (size_t{1} << 31) - 1;
  // `rows` of `row_bytes`, `pitch` apart on the device, become contiguous. row_bytes <= pitch <= kMostPitch.
  void CopyRowsToHost(void* target, CuPointer source, size_t row_bytes, size_t pitch, size_t rows,
                      CuStream stream) const;
  // Any number of such copies in one call, in any order. False, and perhaps some of them enqueued, where the
  // driver has no such call (before 12.8), or refuses it: single calls are to be made then. `stream` is not
  // the default one.
  bool CopyBatchToHost(CuPointer* targets, CuPointer* sources, size_t* bytes, size_t count,
                       CuStream stream) const;
  void CopyToDevice(CuPointer target, const void* source, size_t bytes, CuStream stream) const;
  // `rows` of `row_bytes`, apart by either pitch. row_bytes <= pitch <= kMostPitch.
  void CopyRowsToDevice(CuPointer target, size_t target_pitch, const void* source, size_t source_pitch,
                        size_t row_bytes, size_t rows, CuStream stream) const;
  void RegisterHost(void* memory, size_t bytes) const;
  void UnregisterHost(void* memory) const noexcept;

 private:
  struct Table;
  explicit Driver(std::unique_ptr<Table> table);
  void Check(int result, const char* call) const;
  void CheckCopy(int result, const char* call) const;

  std::shared_ptr<Table> table_;  // constant after construction; the library is never closed
  mutable std::atomic<bool> has_batches_{false};
};

// A context that is current on this thread for as long as this lives: objects of the driver may be
// dropped by any thread, and calls that free them need their context.
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

// RelaxCapture for as long as this lives, on a thread that is not ours.
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
