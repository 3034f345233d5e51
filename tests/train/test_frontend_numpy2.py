"""The front end in the training environment (numpy 2, no scipy, no librosa): the golden features again."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from cosyvoice.frontend import kaldi_fbank, log_mel_24k, resample, whisper_log_mel

GOLDEN = load_file(Path(__file__).parents[1] / "data" / "golden" / "features.safetensors")


def test_golden_features_under_numpy_2():
    assert int(np.__version__.split(".")[0]) >= 2
    wave_24k = GOLDEN["wav_24k"][0]
    wave_16k = resample(wave_24k, 24_000, 16_000)
    np.testing.assert_allclose(wave_16k, GOLDEN["wav_16k_from_24k"][0], atol=1e-6)
    wave_16k = GOLDEN["wav_16k_from_24k"][0]
    np.testing.assert_allclose(log_mel_24k(wave_24k).T, GOLDEN["mel24k"][0], atol=1e-4)
    np.testing.assert_allclose(whisper_log_mel(wave_16k).T, GOLDEN["whisper_logmel128"][0], atol=1e-4)
    np.testing.assert_allclose(kaldi_fbank(wave_16k), GOLDEN["fbank16k_mean_sub"], atol=1e-4)
