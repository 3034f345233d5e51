"""Features against the golden ones of the reference front end, and against librosa and kaldi-native-fbank."""

from pathlib import Path

import kaldi_native_fbank as knf
import librosa
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from cosyvoice.frontend import kaldi_fbank, log_mel_24k, resample, whisper_log_mel
from cosyvoice.frontend.features import kaldi_filters, slaney_filters

GOLDEN = load_file(Path(__file__).parents[1] / "data" / "golden" / "features.safetensors")
FEATURES = {
    "mel": (log_mel_24k, 24_000),
    "whisper": (whisper_log_mel, 16_000),
    "fbank": (kaldi_fbank, 16_000),
}


def speech_like(seconds: float, hz: int, seed: int = 0) -> np.ndarray:
    """A swept tone with harmonics and noise: energy in every band, nothing on a floor."""
    t = np.arange(int(seconds * hz)) / hz
    f0 = 120 + 60 * np.sin(2 * np.pi * 1.5 * t)
    tone = sum(np.sin(k * 2 * np.pi * np.cumsum(f0) / hz) / k for k in range(1, 12))
    return (0.1 * tone + 0.02 * np.random.default_rng(seed).standard_normal(t.size)).astype(np.float32)


def test_filter_banks_equal_the_golden_ones():
    np.testing.assert_allclose(slaney_filters(24_000, 1920, 80), GOLDEN["mel24k_basis"], atol=1e-8)
    np.testing.assert_allclose(slaney_filters(16_000, 400, 128), GOLDEN["whisper_filters128"], atol=1e-8)
    np.testing.assert_allclose(kaldi_filters()[:, :256], GOLDEN["kaldi_mel_banks"], atol=1e-5)
    assert kaldi_filters()[:, 256].abs().max() == 0


@pytest.mark.parametrize(("hz", "n_fft", "bins", "top"), [(22_050, 1024, 40, 8e3), (24_000, 1920, 80, 12e3)])
def test_slaney_filters_equal_librosa_at_other_sizes(hz, n_fft, bins, top):
    expected = librosa.filters.mel(sr=hz, n_fft=n_fft, n_mels=bins, fmin=0, fmax=top)
    np.testing.assert_allclose(slaney_filters(hz, n_fft, bins, top), expected, atol=1e-8)


@pytest.mark.parametrize(
    ("source", "from_hz", "to_hz", "golden"),
    [
        ("wav_24k", 24_000, 16_000, "wav_16k_from_24k"),
        ("wav_16k_from_24k", 16_000, 24_000, "wav_24k_from_16k"),
    ],
)
def test_resampling_equals_the_golden_waves(source, from_hz, to_hz, golden):
    out = resample(GOLDEN[source][0], from_hz, to_hz)
    assert out.dtype == np.float32
    assert out.shape == GOLDEN[golden][0].shape
    np.testing.assert_allclose(out, GOLDEN[golden][0], atol=1e-6)


@pytest.mark.parametrize("from_hz", [16_000, 22_050, 44_100, 48_000, 24_001])
def test_resampling_keeps_a_tone_and_removes_what_would_alias(from_hz):
    t = np.arange(from_hz) / from_hz
    to_hz = 16_000 if from_hz > 16_000 else 24_000
    out = resample(np.sin(2 * np.pi * 1000 * t).astype(np.float32), from_hz, to_hz)
    expected = np.sin(2 * np.pi * 1000 * np.arange(out.size) / out.size)
    np.testing.assert_allclose(out[200:-200], expected[200:-200], atol=5e-3)
    if from_hz >= 44_100:
        above = resample(np.sin(2 * np.pi * 12_000 * t).astype(np.float32), from_hz, 16_000)
        assert np.abs(above[200:-200]).max() < 5e-3


def test_resampling_in_blocks_has_no_seams():
    wave = speech_like(8.0, 24_000)  # 128,000 output samples: two blocks
    whole = resample(wave, 24_000, 16_000)
    start = 60_000
    part = resample(wave[start * 3 // 2 :], 24_000, 16_000)
    np.testing.assert_allclose(whole[start + 20 :], part[20:], atol=1e-6)


def test_resampling_refuses_batches_and_bad_rates():
    with pytest.raises(ValueError, match="one dimension"):
        resample(np.zeros((2, 100), np.float32), 24_000, 16_000)
    with pytest.raises(ValueError, match="0 Hz"):
        resample(np.zeros(100, np.float32), 0, 16_000)


def test_features_equal_the_golden_ones():
    wave_24k, wave_16k = GOLDEN["wav_24k"][0], GOLDEN["wav_16k_from_24k"][0]
    np.testing.assert_allclose(log_mel_24k(wave_24k).T, GOLDEN["mel24k"][0], atol=1e-4)
    np.testing.assert_allclose(whisper_log_mel(wave_16k).T, GOLDEN["whisper_logmel128"][0], atol=1e-4)
    np.testing.assert_allclose(kaldi_fbank(wave_16k, subtract_mean=False), GOLDEN["fbank16k"], atol=1e-4)
    np.testing.assert_allclose(kaldi_fbank(wave_16k), GOLDEN["fbank16k_mean_sub"], atol=1e-4)


def test_kaldi_fbank_equals_kaldi_native_fbank():
    wave = speech_like(1.3, 16_000)
    options = knf.FbankOptions()
    options.frame_opts.dither = 0
    options.frame_opts.samp_freq = 16_000
    options.frame_opts.snip_edges = True
    options.mel_opts.num_bins = 80
    options.mel_opts.low_freq = 20
    options.mel_opts.high_freq = 0
    options.energy_floor = 0
    online = knf.OnlineFbank(options)
    online.accept_waveform(16_000, wave.tolist())
    online.input_finished()
    expected = np.stack([online.get_frame(i) for i in range(online.num_frames_ready)])
    np.testing.assert_allclose(kaldi_fbank(wave, subtract_mean=False), expected, atol=2e-3)


def test_log_mel_24k_equals_librosa():
    wave = speech_like(1.1, 24_000)
    padded = np.pad(wave, 720, mode="reflect")
    spectrum = librosa.stft(padded, n_fft=1920, hop_length=480, window="hann", center=False)
    magnitude = np.sqrt(np.abs(spectrum) ** 2 + 1e-9)
    filters = librosa.filters.mel(sr=24_000, n_fft=1920, n_mels=80, fmax=8000)
    expected = np.log(np.maximum(filters @ magnitude, 1e-5))
    np.testing.assert_allclose(log_mel_24k(wave).T, expected, atol=1e-4)


@pytest.mark.parametrize("name", FEATURES)
def test_a_batch_equals_its_rows_even_when_one_is_much_louder(name):
    feature, hz = FEATURES[name]
    rows = np.stack([speech_like(0.8, hz, seed) * gain for seed, gain in ((1, 1.0), (2, 1e-3), (3, 0.1))])
    batch = feature(torch.from_numpy(rows).unflatten(0, (3, 1)))
    assert batch.dtype == torch.float32
    assert batch.shape[:2] == (3, 1)
    for row, features in zip(rows, batch[:, 0], strict=True):
        np.testing.assert_allclose(features, feature(row), atol=1e-5)


@pytest.mark.parametrize(("name", "frames"), [("mel", 50), ("whisper", 100), ("fbank", 98)])
def test_frame_counts_of_one_second(name, frames):
    feature, hz = FEATURES[name]
    assert len(feature(np.zeros(hz, np.float32))) == frames


@pytest.mark.parametrize(("name", "least"), [("mel", 721), ("whisper", 201), ("fbank", 400)])
def test_waves_shorter_than_a_window_are_refused(name, least):
    feature, _ = FEATURES[name]
    assert len(feature(np.zeros(least, np.float32))) == 1
    with pytest.raises(ValueError, match=rf"shape \[{least - 1}\]"):
        feature(np.zeros(least - 1, np.float32))


@pytest.mark.parametrize("name", FEATURES)
def test_integer_samples_are_refused(name):
    feature, hz = FEATURES[name]
    with pytest.raises(ValueError, match="int16"):
        feature(np.zeros(hz, np.int16))
