# The CUDA language, for SPIN_CUDA=ON. Compiling needs no GPU.
set(SPIN_CUDA_ARCHITECTURES "90" CACHE STRING "GPUs to compile for: 80, 90, 100 or several")
set(CMAKE_CUDA_ARCHITECTURES ${SPIN_CUDA_ARCHITECTURES})
if(NOT CMAKE_CUDA_COMPILER AND EXISTS /usr/local/cuda/bin/nvcc)
  set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
endif()
enable_language(CUDA)
# CMake 3.25 knows no C++20 for nvcc and ignores the request without a word.
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
find_package(CUDAToolkit REQUIRED)
if(SPIN_CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${SPIN_CCACHE})
endif()
# Line numbers for profilers and compute-sanitizer cost nothing at run time. --fmad stays on:
# products and sums are float either way, and tolerances are those of the operation.
add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>
                    $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo>
                    $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
