// Room for what a kernel makes of its inputs; kept, because fresh memory costs a page fault every 4 KiB.

#pragma once

#include <cstdint>
#include <memory>

namespace {

// Uninitialised, and the calling thread's until its next call from the same file.
inline float* scratch(int64_t floats) {
  static thread_local std::unique_ptr<float[]> room;
  static thread_local int64_t size = 0;
  if (size < floats) {
    room.reset(new float[floats]);
    size = floats;
  }
  return room.get();
}

}  // namespace
