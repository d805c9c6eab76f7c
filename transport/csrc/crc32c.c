/*
 * CRC-32C (Castagnoli), reflected, as in iSCSI (RFC 3720, B.4).
 *
 * A processor's CRC instruction takes 8 bytes a cycle but has a latency of three, so a long buffer
 * is cut into three parts that advance together. The registers of the parts become one by
 * arithmetic modulo the polynomial: crc(A then B) = crc(A) * x^(8 * length of B) + crc(B).
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define POLYNOMIAL 0x82f63b78u /* bit 31 stands for x^0 */
#define X_TO_8 (1u << (31 - 8))

enum { STREAMS = 3, SHORT_BYTES = 32768 /* below, joining costs more than it saves */ };

static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;

    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit)
            product ^= b;
        b = b >> 1 ^ (b & 1 ? POLYNOMIAL : 0);
    }
    return product;
}

/* Returns what the register becomes after so many zero bytes. */
static uint32_t skip(uint32_t crc, size_t num_bytes)
{
    for (uint32_t power = X_TO_8; num_bytes; num_bytes >>= 1, power = multiply(power, power))
        if (num_bytes & 1)
            crc = multiply(crc, power);
    return crc;
}

static uint32_t table[256];

__attribute__((constructor)) static void fill_table(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        table[byte] = crc;
    }
}

static uint32_t advance_portable(uint32_t crc, const uint8_t *data, size_t length)
{
    for (; length; length--)
        crc = crc >> 8 ^ table[(uint8_t)crc ^ *data++];
    return crc;
}

#if defined(__x86_64__)
#include <nmmintrin.h>
#define CRC_TARGET __attribute__((target("sse4.2")))
#define CRC_WORD(crc, word) ((uint32_t)_mm_crc32_u64(crc, word))
#define CRC_BYTE(crc, byte) _mm_crc32_u8(crc, byte)
static int has_instruction(void) { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#define CRC_TARGET __attribute__((target("+crc")))
#define CRC_WORD(crc, word) __builtin_aarch64_crc32cx(crc, word)
#define CRC_BYTE(crc, byte) __builtin_aarch64_crc32cb(crc, byte)
static int has_instruction(void) { return getauxval(AT_HWCAP) >> 7 & 1; /* HWCAP_CRC32 */ }
#endif

#if defined(CRC_TARGET)
static uint64_t word_at(const uint8_t *data)
{
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

CRC_TARGET static uint32_t advance_hardware(uint32_t crc, const uint8_t *data, size_t length)
{
    if (length >= SHORT_BYTES) {
        size_t part = length / STREAMS / 8 * 8;
        uint32_t second = 0, third = 0;
        for (size_t i = 0; i < part; i += 8) {
            crc = CRC_WORD(crc, word_at(data + i));
            second = CRC_WORD(second, word_at(data + part + i));
            third = CRC_WORD(third, word_at(data + 2 * part + i));
        }
        crc = skip(crc, 2 * part) ^ skip(second, part) ^ third;
        data += STREAMS * part;
        length -= STREAMS * part;
    }
    for (; length >= 8; data += 8, length -= 8)
        crc = CRC_WORD(crc, word_at(data));
    for (; length; length--)
        crc = CRC_BYTE(crc, *data++);
    return crc;
}

#else
#define advance_hardware advance_portable
static int has_instruction(void) { return 0; }
#endif

/* `seed` is the CRC of what came before, 0 at the start. */
uint32_t dkm_crc32c(uint32_t seed, const uint8_t *data, size_t length)
{
    return ~(has_instruction() ? advance_hardware : advance_portable)(~seed, data, length);
}

/* The same without the processor's instruction. */
uint32_t dkm_crc32c_portable(uint32_t seed, const uint8_t *data, size_t length)
{
    return ~advance_portable(~seed, data, length);
}
