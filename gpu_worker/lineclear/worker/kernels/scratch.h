// Scratch memory of a kernel, kept between calls: fresh memory costs a page fault every 4 KiB.

#pragma once

#include <cstdint>
#include <memory>

namespace {

// Uninitialised memory, the calling thread's until its next call from the same file.
inline float* scratch(int64_t floats) {
  static thread_local std::unique_ptr<float[]> buffer;
  static thread_local int64_t size = 0;
  if (size < floats) {
    buffer.reset(new float[floats]);
    size = floats;
  }
  return buffer.get();
}

}  // namespace
