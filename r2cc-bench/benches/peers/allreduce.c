// AllReduce of float32 sums with MPI, in place, as the bench asks for it.
//   allreduce BYTES:WARMUP:COUNT...   one line of JSON for each size: every call's time, the slowest rank's;
//                                     the results of the calls before are checked
//   allreduce loop BYTES              one line for each call, until it is killed
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, world;

static float *fill(float *buffer, size_t elements) {
	for (size_t i = 0; i < elements; i++)
		buffer[i] = (float)(rank + 1) * (float)(i % 13);
	return buffer;
}

static long long wrong(const float *buffer, size_t elements) {
	long long found = 0;
	for (size_t i = 0; i < elements; i++)
		found += buffer[i] != (float)(world * (world + 1) / 2) * (float)(i % 13);
	return found;
}

static double all_reduce(float *buffer, size_t elements) {
	double start = MPI_Wtime();
	MPI_Allreduce(MPI_IN_PLACE, buffer, (int)elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
	return MPI_Wtime() - start;
}

static void measure(size_t bytes, int warmup, int count) {
	size_t elements = bytes / sizeof(float);
	float *buffer = malloc(bytes);
	double *seconds = malloc(count * sizeof(double)), *slowest = malloc(count * sizeof(double));
	long long mine = 0, all = 0;
	for (int i = 0; i < warmup; i++) {
		all_reduce(fill(buffer, elements), elements);
		mine += wrong(buffer, elements);
	}
	// Sums of zeros: what is timed is the calls, and what the processors do is theirs.
	memset(buffer, 0, bytes);
	MPI_Barrier(MPI_COMM_WORLD);
	if (rank == 0) {
		printf("{\"begin\":%zu}\n", bytes);
		fflush(stdout);
	}
	for (int i = 0; i < count; i++) {
		// A large call starts when every rank is ready; small ones follow each other as fast as they can.
		if (bytes > 65536)
			MPI_Barrier(MPI_COMM_WORLD);
		seconds[i] = all_reduce(buffer, elements);
	}
	MPI_Reduce(seconds, slowest, count, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
	MPI_Reduce(&mine, &all, 1, MPI_LONG_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
	if (rank == 0) {
		printf("{\"bytes\":%zu,\"wrong\":%lld,\"nanos\":[", bytes, all);
		for (int i = 0; i < count; i++)
			printf("%s%.0f", i ? "," : "", slowest[i] * 1e9);
		printf("]}\n");
		fflush(stdout);
	}
	free(buffer), free(seconds), free(slowest);
}

static void loop(size_t bytes) {
	size_t elements = bytes / sizeof(float);
	float *buffer = malloc(bytes);
	for (;;) {
		double took = all_reduce(fill(buffer, elements), elements);
		long long found = wrong(buffer, elements);
		if (rank == 0 || found) {
			printf("{\"seconds\":%.6f,\"wrong\":%lld}\n", took, found);
			fflush(stdout);
		}
	}
}

int main(int argc, char **argv) {
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &world);
	if (argc == 3 && !strcmp(argv[1], "loop")) {
		loop(strtoull(argv[2], NULL, 10));
	} else {
		for (int i = 1; i < argc; i++) {
			size_t bytes;
			int warmup, count;
			if (sscanf(argv[i], "%zu:%d:%d", &bytes, &warmup, &count) != 3)
				MPI_Abort(MPI_COMM_WORLD, 64);
			measure(bytes, warmup, count);
		}
	}
	MPI_Finalize();
	return 0;
}
