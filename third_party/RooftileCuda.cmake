# SPDX-License-Identifier: Apache-2.0
# Decides whether GPU kernels are built, and says so. Sets ROOFTILE_CUDA_ENABLED, enables the language and sets
# ROOFTILE_CUDA_TARGETS: machine code "sm_80" and PTX "compute_80" of the build. ROOFTILE_HOPPER_ARCHITECTURES: of the
# targets with kernels for Hopper.
set(ROOFTILE_CUDA_ENABLED OFF)
find_program(ROOFTILE_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
mark_as_advanced(ROOFTILE_NVCC)
if(ROOFTILE_CUDA STREQUAL "ON")
  if(NOT ROOFTILE_NVCC)
    message(FATAL_ERROR "rooftile: ROOFTILE_CUDA=ON, but nvcc was not found; put it on PATH, set CUDACXX, or use AUTO or OFF")
  endif()
  set(ROOFTILE_CUDA_ENABLED ON)
elseif(ROOFTILE_CUDA STREQUAL "AUTO")
  find_library(ROOFTILE_CUDA_DRIVER NAMES cuda libcuda.so.1 PATHS /usr/local/nvidia/lib64 /usr/lib/wsl/lib NO_CACHE)
  if(ROOFTILE_NVCC AND ROOFTILE_CUDA_DRIVER)
    set(ROOFTILE_CUDA_ENABLED ON)
  else()
    set(missing "nvcc")
    if(ROOFTILE_NVCC)
      set(missing "NVIDIA driver")
    endif()
    message(STATUS "rooftile: building the CPU library (ROOFTILE_CUDA=AUTO, no ${missing} found)")
  endif()
elseif(ROOFTILE_CUDA STREQUAL "OFF")
  message(STATUS "rooftile: building the CPU library (ROOFTILE_CUDA=OFF)")
else()
  message(FATAL_ERROR "rooftile: ROOFTILE_CUDA must be AUTO, ON or OFF, got \"${ROOFTILE_CUDA}\"")
endif()

if(ROOFTILE_CUDA_ENABLED)
  # sm_80 machine code serves 8.x, its PTX whatever is newer than 9.0; 90a has the kernels recompiled for Hopper.
  set(ROOFTILE_CUDA_ARCHITECTURES "80-real;80-virtual;90a-real" CACHE STRING "Architectures of the GPU kernels")
  set(CMAKE_CUDA_COMPILER ${ROOFTILE_NVCC})
  set(CMAKE_CUDA_ARCHITECTURES ${ROOFTILE_CUDA_ARCHITECTURES})
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  enable_language(CUDA)
  if(CMAKE_CUDA_ARCHITECTURES STREQUAL "native")
    set(CMAKE_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES_NATIVE})
  endif()
  find_package(CUDAToolkit REQUIRED)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.4)
    message(FATAL_ERROR "rooftile: nvcc 12.4 or newer is needed, ${ROOFTILE_NVCC} is ${CMAKE_CUDA_COMPILER_VERSION}; "
                        "ROOFTILE_CUDA=OFF builds the CPU library")
  endif()
  include(RooftileCutlass)
  message(STATUS "rooftile: building GPU kernels for ${ROOFTILE_CUDA_ARCHITECTURES} with nvcc ${CMAKE_CUDA_COMPILER_VERSION}, "
                 "CuTe from ${ROOFTILE_CUTLASS_INCLUDE}")

  string(REGEX REPLACE "([0-9]+a?)-real" "sm_\\1" ROOFTILE_CUDA_TARGETS "${CMAKE_CUDA_ARCHITECTURES}")
  string(REGEX REPLACE "([0-9]+a?)-virtual" "compute_\\1" ROOFTILE_CUDA_TARGETS "${ROOFTILE_CUDA_TARGETS}")
  list(TRANSFORM ROOFTILE_CUDA_TARGETS REPLACE "^([0-9]+a?)$" "sm_\\1;compute_\\1")   # a number alone is both

  # Kernels of wgmma and TMA are compiled for Hopper alone; in a build without it they are empty, so that all links.
  set(ROOFTILE_HOPPER_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES})
  list(FILTER ROOFTILE_HOPPER_ARCHITECTURES INCLUDE REGEX "^90a")
  if(NOT ROOFTILE_HOPPER_ARCHITECTURES)
    set(ROOFTILE_HOPPER_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES})
  endif()

  # rooftile_cuda_language: every .cu file. rooftile_cuda_flags: the kernels of the wheel, whose reports are checked.
  add_library(rooftile_cuda_language INTERFACE)
  target_include_directories(rooftile_cuda_language SYSTEM INTERFACE ${ROOFTILE_CUTLASS_INCLUDE})
  target_compile_options(rooftile_cuda_language INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
  add_library(rooftile_cuda_flags INTERFACE)
  target_compile_options(rooftile_cuda_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
  target_link_libraries(rooftile_cuda_flags INTERFACE rooftile_cuda_language CUDA::cudart_static)
endif()
