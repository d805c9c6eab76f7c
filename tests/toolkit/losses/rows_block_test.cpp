// The CUDA kernels' arithmetic on the CPU: the functions that a thread runs there, for the threads
// of a block one after another, and the reductions and merges in the order of rows_cuda.cu.
#include <vector>

#include "rows_block.h"

namespace rows {
namespace {

// Values of all threads of a block.
template <class Real>
struct Block {
  Real teacher[THREADS][PER_THREAD], student[THREADS][PER_THREAD];
  int64_t row, first, count;

  Block(const RowsTile& tile, int64_t index) {
    const int64_t chunks = num_chunks(tile.columns);
    row = index / chunks;
    first = index % chunks * CHUNK;
    count = tile.columns - first < CHUNK ? tile.columns - first : CHUNK;
    for (int thread = 0; thread < THREADS; thread++) {
      load(tile.teacher, tile.teacher_type, row * tile.teacher_stride + first, count, thread,
           teacher[thread]);
      load(tile.student, tile.student_type, row * tile.student_stride + first, count, thread,
           student[thread]);
    }
  }
};

// Lanes exchange with their neighbours at 16, 8, 4, 2 and 1; then the warps follow in order.
template <int count, class Real, class Combine>
void reduce(Real (&values)[THREADS][count], const Combine& combine) {
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    Real old[THREADS][count];
    memcpy(old, values, sizeof old);
    for (int thread = 0; thread < THREADS; thread++)
      for (int i = 0; i < count; i++)
        values[thread][i] = combine(old[thread][i], old[thread ^ distance][i]);
  }
  for (int warp = 1; warp < WARPS; warp++)
    for (int i = 0; i < count; i++) values[0][i] = combine(values[0][i], values[warp * WARP][i]);
}

template <class Real>
State<Real> block_statistics(const RowsTile& tile, int64_t index, Real inv_tau) {
  const Block<Real> block(tile, index);
  Real maxima[THREADS][2], sums[THREADS][5];
  for (int t = 0; t < THREADS; t++) thread_maxima(block.teacher[t], block.student[t], maxima[t]);
  reduce(maxima, Larger());
  for (int t = 0; t < THREADS; t++)
    thread_statistics(block.teacher[t], block.student[t], maxima[0], inv_tau, sums[t]);
  reduce(sums, Sum());
  return block_state(maxima[0], sums[0]);
}

template <class Real>
int statistics(const RowsTile& tile, const RowsObjective& objective, const RowsLaunch&,
               const int64_t* labels, State<Real>* partials, State<Real>* state) {
  const int64_t chunks = num_chunks(tile.columns);
  const Real inv_tau = static_cast<Real>(1 / objective.temperature);
  for (int64_t index = 0; index < tile.rows * chunks; index++)
    partials[index] = block_statistics(tile, index, inv_tau);
  for (int64_t row = 0; row < tile.rows; row++)
    merge_row(tile, row, inv_tau, labels, partials, state);
  return 0;
}

template <class Real>
int finish(const RowsObjective& objective, const RowsLaunch&, int64_t rows,
           const State<Real>* state, Constants<Real>* constants, Sums<Real>* sums, Real* ce) {
  for (int64_t row = 0; row < rows; row++)
    finish_row(state[row], objective.divergence, constants[row], sums[row], ce[row]);
  return 0;
}

template <int divergence, class Real>
Sums<Real> block_sums(const RowsTile& tile, const RowsObjective& objective, int64_t index,
                      const Constants<Real>* constants) {
  const Block<Real> block(tile, index);
  const Row<Real> row = row_of(objective, constants[block.row], Real(0), Real(1));
  Real sums[THREADS][2];
  for (int t = 0; t < THREADS; t++)
    thread_sums<divergence>(block.teacher[t], block.student[t], row, sums[t]);
  reduce(sums, Sum());
  return {sums[0][0], sums[0][1]};
}

template <class Real>
int add_sums(const RowsTile& tile, const RowsObjective& objective, const RowsLaunch&,
             const Constants<Real>* constants, Sums<Real>* partials, Sums<Real>* sums) {
  const int64_t chunks = num_chunks(tile.columns);
  for (int64_t index = 0; index < tile.rows * chunks; index++) switch (objective.divergence) {
#define ROWS_CASE(divergence)                                                        \
  case divergence:                                                                   \
    partials[index] = block_sums<divergence>(tile, objective, index, constants);     \
    break;
      ROWS_SECOND_PASS(ROWS_CASE)
#undef ROWS_CASE
    }
  for (int64_t row = 0; row < tile.rows; row++) add_row(row, chunks, partials, sums);
  return 0;
}

template <int divergence, class Real>
void block_gradient(const RowsTile& tile, const RowsObjective& objective, int64_t index,
                    const int64_t* labels, const Real* weights, const Constants<Real>* constants,
                    const Sums<Real>* sums) {
  Block<Real> block(tile, index);
  const Row<Real> row = row_of(objective, constants[block.row], sums[block.row].mean,
                               weights ? weights[block.row] : Real(1));
  const int64_t label = labels[block.row] - tile.first_column - block.first;
  for (int t = 0; t < THREADS; t++) {
    thread_gradient<divergence>(block.teacher[t], row, static_cast<Real>(objective.softcap), label,
                                t, block.student[t]);
    store(tile.student, tile.student_type, block.row * tile.student_stride + block.first,
          block.count, t, block.student[t]);
  }
}

template <class Real>
int gradient(const RowsTile& tile, const RowsObjective& objective, const RowsLaunch&,
             const int64_t* labels, const Real* weights, const Constants<Real>* constants,
             const Sums<Real>* sums) {
  for (int64_t index = 0; index < tile.rows * num_chunks(tile.columns); index++)
    switch (objective.divergence) {
#define ROWS_CASE(divergence)                                                                   \
  case divergence:                                                                              \
    block_gradient<divergence>(tile, objective, index, labels, weights, constants, sums);       \
    break;
      ROWS_FIRST_PASS(ROWS_CASE)
      ROWS_SECOND_PASS(ROWS_CASE)
#undef ROWS_CASE
    }
  return 0;
}

}  // namespace
}  // namespace rows

#include "rows_entry.h"

const char* rows_error(int) { return "nothing here fails"; }
