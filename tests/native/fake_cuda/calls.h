// What the calls of the fake driver share: their error codes, how each begins, and the calls that copy, which
// copies.cc implements. See fake_cuda.cc for what they imitate.
#pragma once

#include <cstddef>
#include <string>

namespace fake {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kInvalidContext = 201;
constexpr int kInvalidHandle = 400;
constexpr int kNotFound = 500;
constexpr int kNotReady = 600;
constexpr int kIllegalAddress = 700;
constexpr int kStreamCaptureUnsupported = 900;
constexpr int kAlreadyRegistered = 712;

enum Needs { kNothing = 0, kContext = 1, kNoCapture = 2, kCleaningUp = 4 };

// Counts and logs a call, makes it wait if the test holds it, and returns the error it is to return. `needs`
// is any number of Needs.
int Enter(const char* name, const std::string& arguments, int needs);

struct Rows;  // CUDA_MEMCPY2D

int CopyToHost(void* target, unsigned long long source, size_t bytes, void* stream);
int CopyToDevice(unsigned long long target, const void* source, size_t bytes, void* stream);
int CopyRows(const Rows* copy, void* stream);

}  // namespace fake
