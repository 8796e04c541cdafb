// Captured kernel calls: a kernel and the addresses of its arguments, for a call graph (kernels/call_graph.py).
//
// `CAPTURABLE(kernel)` exports `kernel_captured`, which reads each argument from its address with the type of the kernel's
// signature. The values at these addresses may change between two replays; the addresses may not.

#pragma once

#include <cstddef>
#include <utility>

namespace {

template <typename... Arguments, size_t... INDEX>
inline void call_with(void (*kernel)(Arguments...), void* const* arguments, std::index_sequence<INDEX...>) {
  kernel(*static_cast<Arguments*>(arguments[INDEX])...);
}

template <typename... Arguments>
inline void call_with(void (*kernel)(Arguments...), void* const* arguments) {
  call_with(kernel, arguments, std::index_sequence_for<Arguments...>{});
}

}  // namespace

#define CAPTURABLE(kernel) \
  extern "C" void kernel##_captured(void* const* arguments) { call_with(kernel, arguments); }
