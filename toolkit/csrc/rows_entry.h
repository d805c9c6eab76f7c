// The C interface over the functions of a backend, which includes this once.
#pragma once
#include "rows.h"

// Returns the call for the type of the arithmetic, which it calls `Real`.
#define ROWS_FOR_TYPE(type, call) \
  if ((type) == ROWS_FLOAT64) {   \
    using Real = double;          \
    return call;                  \
  } else {                        \
    using Real = float;           \
    return call;                  \
  }

int64_t rows_chunk_columns(void) { return rows::CHUNK; }

int rows_statistics(const RowsTile* tile, const RowsObjective* objective, const RowsLaunch* launch,
                    const int64_t* labels, void* partials, void* state) {
  ROWS_FOR_TYPE(tile->student_type,
                rows::statistics(*tile, *objective, *launch, labels,
                                 static_cast<rows::State<Real>*>(partials),
                                 static_cast<rows::State<Real>*>(state)));
}

int rows_finish(const RowsObjective* objective, const RowsLaunch* launch, int64_t rows,
                int32_t type, const void* state, void* constants, void* sums, void* ce) {
  ROWS_FOR_TYPE(type, rows::finish(*objective, *launch, rows,
                                   static_cast<const rows::State<Real>*>(state),
                                   static_cast<rows::Constants<Real>*>(constants),
                                   static_cast<rows::Sums<Real>*>(sums), static_cast<Real*>(ce)));
}

int rows_sums(const RowsTile* tile, const RowsObjective* objective, const RowsLaunch* launch,
              const void* constants, void* partials, void* sums) {
  ROWS_FOR_TYPE(tile->student_type,
                rows::add_sums(*tile, *objective, *launch,
                               static_cast<const rows::Constants<Real>*>(constants),
                               static_cast<rows::Sums<Real>*>(partials),
                               static_cast<rows::Sums<Real>*>(sums)));
}

int rows_gradient(const RowsTile* tile, const RowsObjective* objective, const RowsLaunch* launch,
                  const int64_t* labels, const void* weights, const void* constants,
                  const void* sums) {
  ROWS_FOR_TYPE(tile->student_type,
                rows::gradient(*tile, *objective, *launch, labels,
                               static_cast<const Real*>(weights),
                               static_cast<const rows::Constants<Real>*>(constants),
                               static_cast<const rows::Sums<Real>*>(sums)));
}
