// Are these two recordings of one person? Needs only sherpa-onnx and a file from `speakernet export --for sherpa-onnx`.
//
//   python -m sherpa_onnx --cflags; python -m sherpa_onnx --c-api-libs    (where headers and libraries are)
//   c++ -std=c++17 verify_sherpa.cpp -I… -L… -lsherpa-onnx-c-api -lonnxruntime -o verify
//   ./verify phone.onnx a.wav b.wav    (16-bit mono WAV at any rate)
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "sherpa-onnx/c-api/c-api.h"

// Uses the C interface: the C++ one passes std::string, which may differ between the compilers of wheel and program.
std::vector<float> Embed(const SherpaOnnxSpeakerEmbeddingExtractor *extractor, const char *path) {
  const SherpaOnnxWave *wave = SherpaOnnxReadWave(path);
  if (!wave) {
    std::fprintf(stderr, "%s: expected a 16-bit mono WAV file\n", path);
    std::exit(2);
  }
  const SherpaOnnxOnlineStream *stream = SherpaOnnxSpeakerEmbeddingExtractorCreateStream(extractor);
  SherpaOnnxOnlineStreamAcceptWaveform(stream, wave->sample_rate, wave->samples, wave->num_samples);
  SherpaOnnxOnlineStreamInputFinished(stream);
  const float *values = SherpaOnnxSpeakerEmbeddingExtractorComputeEmbedding(extractor, stream);
  std::vector<float> embedding(values, values + SherpaOnnxSpeakerEmbeddingExtractorDim(extractor));
  SherpaOnnxSpeakerEmbeddingExtractorDestroyEmbedding(values);
  SherpaOnnxDestroyOnlineStream(stream);
  SherpaOnnxFreeWave(wave);
  return embedding;
}

float Dot(const std::vector<float> &a, const std::vector<float> &b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0f);
}

int main(int count, char **arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: verify phone.onnx a.wav b.wav\n");
    return 2;
  }
  SherpaOnnxSpeakerEmbeddingExtractorConfig config = {arguments[1], 1, 0, "cpu"};
  const SherpaOnnxSpeakerEmbeddingExtractor *extractor = SherpaOnnxCreateSpeakerEmbeddingExtractor(&config);
  if (!extractor) return 2;
  std::vector<float> a = Embed(extractor, arguments[2]), b = Embed(extractor, arguments[3]);
  // Compare the score with a threshold of the model file; `speakernet info` shows them.
  std::printf("score %.4f\n", Dot(a, b) / std::sqrt(Dot(a, a) * Dot(b, b)));
  SherpaOnnxDestroySpeakerEmbeddingExtractor(extractor);
}
