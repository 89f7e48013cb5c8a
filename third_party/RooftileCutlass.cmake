# SPDX-License-Identifier: Apache-2.0
# Finds CuTe's headers: ROOFTILE_CUTLASS_INCLUDE if given, else the nvidia-cutlass wheel where it is installed, else that
# wheel fetched with pip into the build tree, without its dependencies (of which the headers need none).
set(ROOFTILE_CUTLASS_VERSION 4.2.0.0)
set(ROOFTILE_CUTLASS_INCLUDE "" CACHE PATH "Folder that holds cute/tensor.hpp; empty: the nvidia-cutlass wheel")
if(NOT ROOFTILE_CUTLASS_INCLUDE)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
  # pip builds a wheel with PYTHONPATH set so that its own environment, and pip itself, cannot be seen
  set(python ${CMAKE_COMMAND} -E env --unset=PYTHONPATH ${Python_EXECUTABLE})
  execute_process(
    COMMAND ${python} -c "import importlib.metadata as m, importlib.util as u
if m.version('nvidia-cutlass').startswith('4.2.'): print(next(iter(u.find_spec('cutlass_library').submodule_search_locations)))"
    OUTPUT_VARIABLE installed OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(fetched ${PROJECT_SOURCE_DIR}/build/cutlass-${ROOFTILE_CUTLASS_VERSION})
  if(NOT installed AND NOT EXISTS ${fetched}/cutlass_library)
    message(STATUS "rooftile: fetching nvidia-cutlass ${ROOFTILE_CUTLASS_VERSION} (6 MB of headers) with pip")
    execute_process(
      COMMAND ${python} -m pip install --quiet --disable-pip-version-check --no-deps --target ${fetched}
              nvidia-cutlass==${ROOFTILE_CUTLASS_VERSION}
      RESULT_VARIABLE failed ERROR_VARIABLE why)
    if(failed)
      message(FATAL_ERROR "rooftile: could not fetch nvidia-cutlass with pip; install it (pip install --no-deps "
                          "nvidia-cutlass==${ROOFTILE_CUTLASS_VERSION}) or set ROOFTILE_CUTLASS_INCLUDE. pip said:\n${why}")
    endif()
  endif()
  if(NOT installed)
    set(installed ${fetched}/cutlass_library)
  endif()
  set(ROOFTILE_CUTLASS_INCLUDE ${installed}/source/include)
endif()
if(NOT EXISTS ${ROOFTILE_CUTLASS_INCLUDE}/cute/tensor.hpp)
  message(FATAL_ERROR "rooftile: no cute/tensor.hpp in ${ROOFTILE_CUTLASS_INCLUDE}")
endif()

# cute/tensor.hpp takes in the instructions of every architecture. A source that is compiled with one of these folders
# before CuTe's finds those headers empty that it has no use for: of Blackwell, or the MMAs of Hopper, too. Headers take
# the compiler some 15 seconds a source; these folders make it 12, and 10.
set(ROOFTILE_CUTE_OF_SM90 ${CMAKE_BINARY_DIR}/cute-of-sm90)
set(ROOFTILE_CUTE_OF_SM80 ${CMAKE_BINARY_DIR}/cute-of-sm80)
set(blackwell mma_traits_sm100 mma_traits_sm120 mma_traits_sm120_sparse copy_traits_sm100 copy_traits_sm100_tma)
foreach(traits IN LISTS blackwell)
  file(CONFIGURE OUTPUT ${ROOFTILE_CUTE_OF_SM90}/cute/atom/${traits}.hpp CONTENT "")
endforeach()
foreach(traits IN LISTS blackwell ITEMS mma_traits_sm90 mma_traits_sm90_gmma)
  file(CONFIGURE OUTPUT ${ROOFTILE_CUTE_OF_SM80}/cute/atom/${traits}.hpp CONTENT "")
endforeach()
