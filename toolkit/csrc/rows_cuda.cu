// Row kernels on a GPU, in the order of rows_cpu.cpp: a block of threads takes a chunk of a row's
// columns, whose parts are added up in order. No atomics and no host synchronisation; every logit
// is read once for each call, 16 bytes at a time.
#include <cuda_runtime.h>

#include "rows_block.h"

namespace rows {
namespace {

// Returns the sums over all threads of a block, in every thread, in a fixed order.
template <int count, class Real, class Combine>
__device__ void reduce(Real (&values)[count], const Combine& combine) {
  __shared__ Real parts[WARPS][count];
  for (int distance = WARP / 2; distance > 0; distance /= 2)
    ROWS_UNROLL
    for (int i = 0; i < count; i++)
      values[i] = combine(values[i], __shfl_xor_sync(0xffffffffu, values[i], distance));
  __syncthreads();  // an earlier reduction has been read
  if (threadIdx.x % WARP == 0)
    ROWS_UNROLL
    for (int i = 0; i < count; i++) parts[threadIdx.x / WARP][i] = values[i];
  __syncthreads();
  ROWS_UNROLL
  for (int i = 0; i < count; i++) {
    values[i] = parts[0][i];
    for (int warp = 1; warp < WARPS; warp++) values[i] = combine(values[i], parts[warp][i]);
  }
}

// Where this block works.
struct Place {
  int64_t row, first, count;
};

__device__ Place place_of(const RowsTile& tile) {
  const int64_t chunks = num_chunks(tile.columns);
  const int64_t row = blockIdx.x / chunks, first = blockIdx.x % chunks * CHUNK;
  const int64_t rest = tile.columns - first;
  return {row, first, rest < CHUNK ? rest : CHUNK};
}

template <class Real>
__device__ void load_student(const RowsTile& tile, const Place& place, Real (&values)[PER_THREAD]) {
  load(tile.student, tile.student_type, place.row * tile.student_stride + place.first, place.count,
       threadIdx.x, values);
}

template <class Real>
__device__ void load_teacher(const RowsTile& tile, const Place& place, Real (&values)[PER_THREAD]) {
  load(tile.teacher, tile.teacher_type, place.row * tile.teacher_stride + place.first, place.count,
       threadIdx.x, values);
}

template <class Real>
__global__ void __launch_bounds__(THREADS)
    statistics_kernel(RowsTile tile, Real inv_tau, State<Real>* partials) {
  const Place place = place_of(tile);
  Real teacher[PER_THREAD], student[PER_THREAD];
  load_teacher(tile, place, teacher);
  load_student(tile, place, student);
  Real maxima[2];
  thread_maxima(teacher, student, maxima);
  reduce(maxima, Larger());
  Real sums[5];
  thread_statistics(teacher, student, maxima, inv_tau, sums);
  reduce(sums, Sum());
  if (threadIdx.x == 0) partials[blockIdx.x] = block_state(maxima, sums);
}

template <class Real>
__global__ void merge_kernel(RowsTile tile, Real inv_tau, const int64_t* labels,
                             const State<Real>* partials, State<Real>* state) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < tile.rows) merge_row(tile, row, inv_tau, labels, partials, state);
}

template <class Real>
__global__ void finish_kernel(int32_t divergence, int64_t rows, const State<Real>* state,
                              Constants<Real>* constants, Sums<Real>* sums, Real* ce) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < rows) finish_row(state[row], divergence, constants[row], sums[row], ce[row]);
}

template <int divergence, class Real>
__global__ void __launch_bounds__(THREADS)
    sums_kernel(RowsTile tile, RowsObjective objective, const Constants<Real>* constants,
                Sums<Real>* partials) {
  const Place place = place_of(tile);
  const Row<Real> row = row_of(objective, constants[place.row], Real(0), Real(1));
  Real teacher[PER_THREAD], student[PER_THREAD], sums[2];
  load_teacher(tile, place, teacher);
  load_student(tile, place, student);
  thread_sums<divergence>(teacher, student, row, sums);
  reduce(sums, Sum());
  if (threadIdx.x == 0) partials[blockIdx.x] = {sums[0], sums[1]};
}

template <class Real>
__global__ void add_sums_kernel(int64_t rows, int64_t chunks, const Sums<Real>* partials,
                                Sums<Real>* sums) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < rows) add_row(row, chunks, partials, sums);
}

template <int divergence, class Real>
__global__ void __launch_bounds__(THREADS)
    gradient_kernel(RowsTile tile, RowsObjective objective, const int64_t* labels,
                    const Real* weights, const Constants<Real>* constants,
                    const Sums<Real>* sums) {
  const Place place = place_of(tile);
  const Row<Real> row = row_of(objective, constants[place.row], sums[place.row].mean,
                               weights ? weights[place.row] : Real(1));
  const int64_t label = labels[place.row] - tile.first_column - place.first;
  Real teacher[PER_THREAD], student[PER_THREAD];
  load_teacher(tile, place, teacher);
  load_student(tile, place, student);
  thread_gradient<divergence>(teacher, row, static_cast<Real>(objective.softcap), label,
                              threadIdx.x, student);
  store(tile.student, tile.student_type, place.row * tile.student_stride + place.first,
        place.count, threadIdx.x, student);
}

// ---- launches ------------------------------------------------------------------------------

struct Grid {
  cudaStream_t stream;
  unsigned blocks;      // one for each chunk of each row
  unsigned row_blocks;  // one for THREADS rows
};

int grid_of(const RowsLaunch& launch, int64_t rows, int64_t columns, Grid& grid) {
  const int64_t blocks = rows * num_chunks(columns);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  grid = {static_cast<cudaStream_t>(launch.stream), static_cast<unsigned>(blocks),
          static_cast<unsigned>((rows + THREADS - 1) / THREADS)};
  return cudaSetDevice(launch.device);
}

template <class Real>
int statistics(const RowsTile& tile, const RowsObjective& objective, const RowsLaunch& launch,
               const int64_t* labels, State<Real>* partials, State<Real>* state) {
  Grid grid;
  if (const int code = grid_of(launch, tile.rows, tile.columns, grid)) return code;
  const Real inv_tau = static_cast<Real>(1 / objective.temperature);
  statistics_kernel<<<grid.blocks, THREADS, 0, grid.stream>>>(tile, inv_tau, partials);
  if (const int code = cudaGetLastError()) return code;
  merge_kernel<<<grid.row_blocks, THREADS, 0, grid.stream>>>(tile, inv_tau, labels, partials,
                                                             state);
  return cudaGetLastError();
}

template <class Real>
int finish(const RowsObjective& objective, const RowsLaunch& launch, int64_t rows,
           const State<Real>* state, Constants<Real>* constants, Sums<Real>* sums, Real* ce) {
  Grid grid;
  if (const int code = grid_of(launch, rows, 0, grid)) return code;
  finish_kernel<<<grid.row_blocks, THREADS, 0, grid.stream>>>(objective.divergence, rows, state,
                                                              constants, sums, ce);
  return cudaGetLastError();
}

template <class Real>
int add_sums(const RowsTile& tile, const RowsObjective& objective, const RowsLaunch& launch,
             const Constants<Real>* constants, Sums<Real>* partials, Sums<Real>* sums) {
  Grid grid;
  if (const int code = grid_of(launch, tile.rows, tile.columns, grid)) return code;
  switch (objective.divergence) {
#define ROWS_CASE(divergence)                                              \
  case divergence:                                                         \
    sums_kernel<divergence><<<grid.blocks, THREADS, 0, grid.stream>>>(     \
        tile, objective, constants, partials);                             \
    break;
    ROWS_SECOND_PASS(ROWS_CASE)
#undef ROWS_CASE
    default:
      return cudaErrorInvalidValue;
  }
  if (const int code = cudaGetLastError()) return code;
  add_sums_kernel<<<grid.row_blocks, THREADS, 0, grid.stream>>>(
      tile.rows, num_chunks(tile.columns), partials, sums);
  return cudaGetLastError();
}

template <class Real>
int gradient(const RowsTile& tile, const RowsObjective& objective, const RowsLaunch& launch,
             const int64_t* labels, const Real* weights, const Constants<Real>* constants,
             const Sums<Real>* sums) {
  Grid grid;
  if (const int code = grid_of(launch, tile.rows, tile.columns, grid)) return code;
  switch (objective.divergence) {
#define ROWS_CASE(divergence)                                              \
  case divergence:                                                         \
    gradient_kernel<divergence><<<grid.blocks, THREADS, 0, grid.stream>>>( \
        tile, objective, labels, weights, constants, sums);                \
    break;
    ROWS_FIRST_PASS(ROWS_CASE)
    ROWS_SECOND_PASS(ROWS_CASE)
#undef ROWS_CASE
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace
}  // namespace rows

#include "rows_entry.h"

const char* rows_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
