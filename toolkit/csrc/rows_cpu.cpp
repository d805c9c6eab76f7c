// Row kernels on the CPU: a row's columns go through in chunks that stay in the first-level cache.
//
// Chunks are the same whatever the number of threads, and their parts are added up in order: so
// are the bits of the results.
#include "rows_chunk.h"

// The loops are compiled for several levels of x86-64, and the loader takes the best.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define ROWS_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ROWS_CLONES
#endif

namespace rows {
namespace {

// target_clones knows no templates.
#define ROWS_DEFINE(Real)                                                                    \
  ROWS_CLONES State<Real> statistics_piece(const RowsTile& tile, const Piece& piece,         \
                                           Real inv_tau) {                                   \
    return statistics_of(tile, piece, inv_tau);                                              \
  }                                                                                          \
  ROWS_CLONES Sums<Real> sums_piece(const RowsTile& tile, const Piece& piece,                \
                                    const RowsObjective& objective,                          \
                                    const Constants<Real>& constants) {                      \
    return sums_of_piece(tile, piece, objective, constants);                                 \
  }                                                                                          \
  ROWS_CLONES void gradient_piece(const RowsTile& tile, const Piece& piece,                  \
                                  const RowsObjective& objective, int64_t label,             \
                                  const Constants<Real>& constants, Real mean, Real weight) { \
    gradient_of_piece(tile, piece, objective, label, constants, mean, weight);               \
  }
ROWS_DEFINE(float)
ROWS_DEFINE(double)
#undef ROWS_DEFINE

template <class Work>
void for_each(int64_t count, const RowsLaunch& launch, const Work& work) {
#pragma omp parallel for schedule(static) num_threads(launch.num_threads)
  for (int64_t index = 0; index < count; index++) work(index);
}

template <class Real>
Real logit(const RowsTile& tile, int64_t row, int64_t column) {
  Real buffer;
  return *load<Real>(tile.student, tile.student_type, row * tile.student_stride + column, 1,
                     &buffer);
}

template <class Real>
int statistics(const RowsTile& tile, const RowsObjective& objective, const RowsLaunch& launch,
               const int64_t* labels, State<Real>* partials, State<Real>* state) {
  const Real inv_tau = static_cast<Real>(1 / objective.temperature);
  const int64_t chunks = num_chunks(tile);
  for_each(tile.rows * chunks, launch, [&](int64_t index) {
    partials[index] = statistics_piece(tile, piece_of(tile, index), inv_tau);
  });
  for_each(tile.rows, launch, [&](int64_t row) {
    for (int64_t chunk = 0; chunk < chunks; chunk++)
      merge(state[row], partials[row * chunks + chunk], inv_tau);
    const int64_t column = labels[row] - tile.first_column;
    if (column >= 0 && column < tile.columns) state[row].label = logit<Real>(tile, row, column);
  });
  return 0;
}

template <class Real>
int finish(const RowsObjective& objective, const RowsLaunch&, int64_t rows, const State<Real>* state,
            Constants<Real>* constants, Sums<Real>* sums, Real* ce) {
  for (int64_t row = 0; row < rows; row++)
    finish_row(state[row], objective.divergence, constants[row], sums[row], ce[row]);
  return 0;
}

template <class Real>
int add_sums(const RowsTile& tile, const RowsObjective& objective, const RowsLaunch& launch,
             const Constants<Real>* constants, Sums<Real>* partials, Sums<Real>* sums) {
  const int64_t chunks = num_chunks(tile);
  for_each(tile.rows * chunks, launch, [&](int64_t index) {
    const Piece piece = piece_of(tile, index);
    partials[index] = sums_piece(tile, piece, objective, constants[piece.row]);
  });
  for (int64_t index = 0; index < tile.rows * chunks; index++) {
    sums[index / chunks].value += partials[index].value;
    sums[index / chunks].mean += partials[index].mean;
  }
  return 0;
}

template <class Real>
int gradient(const RowsTile& tile, const RowsObjective& objective, const RowsLaunch& launch,
             const int64_t* labels, const Real* weights, const Constants<Real>* constants,
             const Sums<Real>* sums) {
  for_each(tile.rows * num_chunks(tile), launch, [&](int64_t index) {
    const Piece piece = piece_of(tile, index);
    const Real weight = weights ? weights[piece.row] : Real(1);
    const int64_t label = labels[piece.row] - tile.first_column - piece.first;
    gradient_piece(tile, piece, objective, label, constants[piece.row], sums[piece.row].mean,
                   weight);
  });
  return 0;
}

}  // namespace
}  // namespace rows

#include "rows_entry.h"

const char* rows_error(int) { return "the CPU kernels do not fail"; }
