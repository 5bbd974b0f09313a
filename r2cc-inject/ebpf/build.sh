#!/bin/sh
# Rebuilds fault.bpf.o (or the file named by $1) from fault.bpf.c. Needs clang-19, llvm-19,
# libbpf-dev, linux-libc-dev. The object is reproducible: no build path inside, DWARF
# stripped, BTF kept. clang-version records the compiler of the checked-in object: with
# the same one a rebuild is equal byte for byte.
set -eu
cd "$(dirname "$0")"
out="${1:-fault.bpf.o}"
clang="${CLANG:-clang-19}"
"$clang" -O2 -g -Wall -Werror -target bpf -mcpu=v3 \
	-I"/usr/include/$(uname -m)-linux-gnu" -ffile-prefix-map="$PWD"=. \
	-c fault.bpf.c -o "$out"
"${LLVM_STRIP:-llvm-strip-19}" -g "$out"
if [ "$out" = fault.bpf.o ]; then
	"$clang" --version | head -n 1 >clang-version
fi
