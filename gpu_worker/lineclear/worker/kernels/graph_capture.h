// Recorded calls: a kernel beside the places where its arguments lie, so that many of them can be made in one call.
//
// `RECORDABLE(kernel)` exports `kernel_recorded`, which reads each argument from its place, as the type that the kernel's
// own signature gives it. What a place holds may change between two plays; the places themselves may not.

#pragma once

#include <cstddef>
#include <utility>

namespace {

template <typename... Arguments, size_t... INDEX>
inline void call_from(void (*kernel)(Arguments...), void* const* places, std::index_sequence<INDEX...>) {
  kernel(*static_cast<Arguments*>(places[INDEX])...);
}

template <typename... Arguments>
inline void call_from(void (*kernel)(Arguments...), void* const* places) {
  call_from(kernel, places, std::index_sequence_for<Arguments...>{});
}

}  // namespace

#define RECORDABLE(kernel) \
  extern "C" void kernel##_recorded(void* const* places) { call_from(kernel, places); }
