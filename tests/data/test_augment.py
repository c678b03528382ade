"""Augmentation against plain references: signal-to-noise ratios, convolution, keyed draws, the
classic pipeline.
"""

import os

import numpy as np
import pytest
import torch
from scipy.signal import convolve
from torch.testing import assert_close

from speakernet import distributed
from speakernet.corpora.pack_inputs import FolderInput
from speakernet.data.audio import AudioError, write_audio
from speakernet.data.augment import banks as banks_module
from speakernet.data.augment.augmenter import (
    Augmenter,
    _describe_augmentation,
    mu_law_codec,
    response_grid,
    through_microphones,
)
from speakernet.data.augment.banks import (
    BABBLE,
    CLEAN,
    KINDS,
    MUSIC,
    NOISE,
    REVERB,
    ClipBank,
    RirBank,
    clips_into_ram,
    device_responses,
    noise_banks,
)
from speakernet.data.augment.mixers import bytes_of_banks
from speakernet.data.augment.options import AugmentOptions
from speakernet.data.on_device import DeviceAudio
from speakernet.data.packed import RamRows
from speakernet.data.packing import pack
from speakernet.data.sources import AudioCache

SAMPLES = 8000
BATCH = 200


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """MUSAN-like clips (shorter and longer than a crop) and RIRs with a late direct path."""
    random = np.random.default_rng(3)
    root = tmp_path_factory.mktemp("augment")
    for folder in ("noise/free/a", "music/fma/b", "speech/us/c"):
        for number in range(9):
            write_audio(
                root / f"musan/{folder}/{number}.wav",
                0.1 * random.standard_normal(5000 + 1500 * number),
            )
    for number, length in enumerate((300, 5000, 20000)):
        response = random.standard_normal(length) * np.exp(-np.arange(length) / 400) * 0.1
        response[40 + number] = 0.9
        write_audio(root / f"rirs/real/room/{number}.wav", response)
    return root / "musan", root / "rirs"


def make(folders, **options):
    rirs = RirBank(
        folders[1], 16000, AudioCache(1 << 24), is_aligned=options.get("style") != "classic"
    )
    banks = noise_banks(folders[0], 16000, AudioCache(1 << 24))
    return Augmenter(banks, rirs, AugmentOptions(**options))


def speech(random, batch=BATCH):
    return torch.from_numpy((0.1 * random.standard_normal((batch, SAMPLES))).astype(np.float32))


CPU = torch.device("cpu")


def augment(augmenter, clean, epoch=0):
    """By the mixer for devices, which is compared with plain references; a test below compares the
    mixer for hosts with it.
    """
    augmenter.move_to(CPU)
    rows = np.arange(len(clean))
    return augmenter(clean.clone(), epoch=epoch, rows=rows), augmenter.draw(rows, epoch)


@pytest.mark.parametrize("style", ["ours", "classic"])
def test_plain_reference(folders, random, style):
    is_classic = style == "classic"
    clean = speech(random)
    augmenter = make(folders, style=style)
    result, drawn = augment(augmenter, clean)
    noises = augmenter.mixer.noises(drawn, SAMPLES).double().numpy()
    floor = 1e-4 if is_classic else 0
    assert set(drawn.rirs) == {-1, 0, 1, 2} and set(drawn.kinds) == set(range(5))
    for row, audio in enumerate(clean.double().numpy()):
        expected = audio
        sources = noises[drawn.source_rows == row]
        if drawn.kinds[row] == REVERB:
            name = augmenter.rirs.names[int(drawn.rirs[row])]
            response = augmenter.rirs.source.read(name).astype(np.float64)
            response /= np.sqrt(np.square(response).sum())
            direct = 0 if is_classic else np.abs(response).argmax()
            expected = convolve(audio, response[direct:], method="direct")[:SAMPLES]
        elif len(sources):
            if not is_classic:
                # Equally loud talkers are one noise together.
                sources = sources / np.sqrt(np.square(sources).mean(axis=1, keepdims=True))
                sources = sources.sum(axis=0, keepdims=True)
            ratios = 10 ** (drawn.snr_db[drawn.source_rows == row][: len(sources)] / 10)
            powers = np.square(sources).mean(axis=1) + floor
            gains = np.sqrt((np.square(audio).mean() + floor) / powers / ratios)
            expected = audio + gains @ sources
        np.testing.assert_allclose(result[row], expected, rtol=1e-6, atol=2e-5)


def test_ranges_of_draws(folders):
    drawn = make(folders).draw(np.arange(2000), 0)
    for code, (low, high) in ((NOISE, (0, 15)), (MUSIC, (5, 15)), (BABBLE, (13, 20))):
        values = drawn.snr_db[drawn.source_kinds == code]
        assert (
            values.min() >= low
            and values.max() <= high
            and values.max() - values.min() > 0.9 * (high - low)
        )
    rows, counts = np.unique(drawn.source_rows[drawn.source_kinds == BABBLE], return_counts=True)
    assert set(counts) == {3, 4, 5, 6, 7}
    for row in rows:
        clips = drawn.clips[drawn.source_rows == row]
        assert len(set(clips)) == len(clips)
    shares = np.bincount(drawn.kinds, minlength=5) / 2000
    assert shares == pytest.approx([0.2] * 5, abs=0.03)


def test_keyed_draws(folders, random):
    clean = speech(random, 40)
    augmenter = make(folders, telephone_probability=0.3, volume_db=[-6, 6])
    together, _ = augment(augmenter, clean)
    again, _ = augment(make(folders, telephone_probability=0.3, volume_db=[-6, 6]), clean)
    assert torch.equal(together, again)
    other, _ = augment(augmenter, clean, epoch=1)
    assert not torch.equal(together, other)
    for row in (0, 7, 39):
        alone = augmenter(clean[row : row + 1].clone(), epoch=0, rows=np.array([row]))
        assert_close(alone[0], together[row], atol=1e-5, rtol=1e-4)


def test_packed_bank(folders, tmp_path, random):
    for folder in folders:
        pack(FolderInput(folder), tmp_path / folder.name)
    packed = make([tmp_path / "musan", tmp_path / "rirs"], categories=list(KINDS[1:]))
    files = make(folders)
    assert clips_into_ram(packed.banks, 0) and all(
        bank.reader.is_mapped for bank in packed.banks.values()
    )
    clean = speech(random)
    assert_close(augment(packed, clean)[0], augment(files, clean)[0], atol=1e-6, rtol=0)


def test_processes_share_decoded_files(folders, tmp_path, monkeypatch, random):
    monkeypatch.setenv("SPEAKERNET_CACHE", str(tmp_path))
    alone = make(folders)
    clean = speech(random)
    decoded = []
    made = []
    assert clips_into_ram(alone.banks, 1 << 30) and not list(tmp_path.glob("tables/*/samples.npy"))
    monkeypatch.setattr(distributed, "local_world_size", lambda: 2)
    read = ClipBank.read_whole
    monkeypatch.setattr(
        ClipBank, "read_whole", lambda bank, clip: decoded.append(clip) or read(bank, clip)
    )
    for _ in range(2):
        together = make(folders)
        assert clips_into_ram(together.banks, 1 << 30) and isinstance(
            together.rirs.prepare(0).base.base, np.memmap
        )
        # Only the first decodes: nine clips of three kinds.
        assert len(decoded) == 27
        made.append(together)
    for augmenter in made:
        assert_close(augment(augmenter, clean)[0], augment(alone, clean)[0], atol=0, rtol=0)
    assert len(list(tmp_path.glob("tables/*/samples.npy"))) == 4
    os.utime(next(folders[1].rglob("*.wav")), ns=(1, 1))
    make(folders)
    assert len(list(tmp_path.glob("tables/*/samples.npy"))) == 5


def test_category_without_files(folders):
    banks = noise_banks(folders[0], 16000, None)
    del banks["babble"]
    augmenter = Augmenter(banks, None, AugmentOptions())
    assert (augmenter.available, augmenter.missing) == (["music", "noise"], ["reverb", "babble"])
    shares = np.bincount(augmenter.draw(np.arange(4000), 0).kinds, minlength=5) / 4000
    assert shares == pytest.approx([0.2, 0, 0.4, 0, 0.4], abs=0.03)
    assert set(Augmenter({}, None, AugmentOptions()).draw(np.arange(50), 0).kinds) == {CLEAN}


def test_telephone_band_and_codec(folders):
    times = torch.arange(16000) / 16000
    tones = torch.stack([torch.sin(2 * torch.pi * hz * times) for hz in (100, 1000, 5000)])
    band = Augmenter({}, None, AugmentOptions(telephone_probability=1.0))
    coded = Augmenter({}, None, AugmentOptions(codec_probability=1.0))
    kept = augment(band, tones)[0].square().mean(1) / tones.square().mean(1)
    assert kept[1] == pytest.approx(1.0, abs=0.01)
    assert kept[0] < 0.01 and kept[2] < 0.01
    result = augment(coded, tones)[0]
    assert result[2].abs().max() < 0.05
    error = (result[1] - tones[1]).square().mean() / tones[1].square().mean()
    assert 1e-6 < error < 1e-3
    # Full scale is a step of the codec, so no output exceeds it; silence stays silent.
    assert mu_law_codec(torch.zeros(1, 800), 8000).abs().max() == 0
    assert mu_law_codec(torch.sign(tones[1:2, ::2] + 1e-3), 8000).abs().max() == pytest.approx(
        1.0, abs=1e-4
    )


def test_layouts_and_broken_files(tmp_path, caplog):
    with pytest.raises(AudioError, match="no such folder"):
        noise_banks(tmp_path / "none", 16000, None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(AudioError, match=r"empty: none of 0 audio files.*music"):
        noise_banks(tmp_path / "empty", 16000, None)
    with pytest.raises(AudioError, match="none of 0 audio files"):
        RirBank(tmp_path / "empty", 16000, None, is_aligned=True)
    root = tmp_path / "flat"
    write_audio(root / "a.wav", np.ones(100) / 2)
    (root / "b.wav").write_bytes(b"")
    banks = noise_banks(root, 16000, None)
    assert len(banks["noise"]) == 1
    assert "b.wav" in caplog.text and "count as noise" in caplog.text
    write_audio(root / "silent.wav", np.zeros(100))
    rirs = RirBank(root, 16000, None, is_aligned=True)
    assert list(rirs.names) == ["a.wav"] and "2 of 3 files left out" in caplog.text
    (root / "a.wav").unlink()
    with pytest.raises(AudioError, match=r"none of 2 audio files is usable.*b\.wav"):
        RirBank(root, 16000, None, is_aligned=True)


def test_damage_behind_the_header_is_found_first(tmp_path, caplog, random, monkeypatch):
    """A file whose header is whole; with many files the result is kept until a file changes."""
    samples = random.standard_normal(24_000).astype(np.float32) / 10
    for number in range(4):
        write_audio(tmp_path / "noise" / f"{number}.flac", samples)
    whole = (tmp_path / "noise" / "2.flac").read_bytes()
    (tmp_path / "noise" / "2.flac").write_bytes(whole[: len(whole) // 2] + bytes(len(whole) // 2))
    monkeypatch.setattr(banks_module, "MANY_FILES", 2)
    for _ in range(2):
        caplog.clear()
        assert len(noise_banks(tmp_path, 16000, None)["noise"]) == 3
        assert "1 of 4 files left out" in caplog.text and "2.flac" in caplog.text
    (tmp_path / "noise" / "2.flac").write_bytes(whole)
    assert len(noise_banks(tmp_path, 16000, None)["noise"]) == 4


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("style", ["ours", "classic"])
def test_mixers_for_hosts_and_devices(folders, random, style, in_memory):
    clean = speech(random, 80)
    clean[:20] = 0  # silence must give finite values too
    options = {"volume_db": [-6.0, 6.0], "codec_probability": 0.2, "microphone_probability": 0.5}
    augmenter = make(folders, style=style, **options)
    if in_memory:
        assert clips_into_ram(augmenter.banks, 1 << 30)
    expected = augmenter(clean.clone(), epoch=3, rows=np.arange(80))
    made, drawn = augment(augmenter, clean, epoch=3)
    # The codec's steps are coarse, and a sample on an edge may fall to either side.
    assert_close(made[~drawn.codec], expected[~drawn.codec], atol=1e-5, rtol=1e-4)
    assert ((made - expected).abs() > 1e-4).float().mean() < 1e-3
    clips = 2 * 3 * sum(5000 + 1500 * number for number in range(9))
    responses = 4 * (300 + 5000 + 2 * 20000)
    assert bytes_of_banks(augmenter.banks, augmenter.rirs, None) == clips + responses


def test_babble_of_a_resident_corpus(folders, random):
    banks = noise_banks(folders[0], 16000, AudioCache(1 << 24))
    held = torch.from_numpy(random.integers(-3000, 3000, 90_000).astype(np.int16))
    corpus = RamRows(held, np.arange(0, 90_000, 6000), np.full(15, 6000), {})
    banks["babble"] = ClipBank(corpus, np.arange(2, 14), np.full(12, 6000))
    augmenter = Augmenter(banks, None, AugmentOptions())
    clean = speech(random, 60)
    expected = augmenter(clean.clone(), epoch=0, rows=np.arange(60))
    on_device = DeviceAudio(held)
    augmenter.move_to(CPU, corpus=(corpus, on_device))
    made = augmenter(clean.clone(), epoch=0, rows=np.arange(60))
    assert_close(made, expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(made, clean)
    # The music and the noise, of nine clips each.
    assert bytes_of_banks(banks, None, corpus) == 4 * sum(range(5000, 18_000, 1500))


def test_rirs(tmp_path, caplog):
    """RIRS_NOISES also has noises, and responses with up to eight channels."""
    left = np.zeros(400, dtype=np.float32)
    right = np.zeros(400, dtype=np.float32)
    left[[10, 60]] = (0.5, 0.2)
    right[[30, 90]] = (0.5, 0.2)
    for name in (
        "pointsource_noises/noise-1.wav",
        "real_rirs_isotropic_noises/RVB2014_type1_noise_a.wav",
    ):
        write_audio(tmp_path / name, right)
    response = "real_rirs_isotropic_noises/RVB2014_type1_rir_a.wav"
    write_audio(tmp_path / response, np.stack([left, right], axis=1))
    rirs = RirBank(tmp_path, 16000, None, is_aligned=True)
    assert list(rirs.names) == [response] and "2 files skipped" in caplog.text
    taken = rirs.prepare(0)[:400]
    assert np.flatnonzero(taken).tolist() == [0, 50] and taken[50] / taken[0] == pytest.approx(
        0.4, abs=1e-3
    )


def test_microphone_response(random):
    impulses = torch.zeros(2, 6000)
    impulses[:, 3000] = 1
    responses_db = random.normal(0, 5, (2, 10))
    grid = response_grid(impulses, 10, 16000)
    heard = through_microphones(impulses, torch.from_numpy(responses_db).float(), grid)
    # The lowest points are a few hertz apart, closer than so few samples resolve.
    octaves = np.log2(np.fft.rfftfreq(6000, 1 / 16000)[150:])
    found_db = 20 * np.log10(np.abs(np.fft.rfft(heard.numpy())))[:, 150:]
    for found, points_db in zip(found_db, responses_db, strict=True):
        expected = np.interp(octaves, np.log2(np.geomspace(60, 8000, 10)), points_db)
        np.testing.assert_allclose(found, expected, atol=0.5)


def test_draws_of_microphones():
    options = AugmentOptions(categories=[], microphone_probability=0.4, microphone_db=6.0)
    augmenter = Augmenter({}, None, options, seed=3)
    drawn = augmenter.draw(np.arange(3000), 0)
    assert len(drawn.microphones) / 3000 == pytest.approx(0.4, abs=0.03)
    # The outermost points, which the smoothing does not change.
    assert drawn.responses_db[:, [0, -1]].std(axis=0) == pytest.approx([6.0, 6.0], rel=0.06)
    clean = torch.randn(60, 4000, generator=torch.Generator().manual_seed(1))
    made = augmenter(clean.clone(), epoch=0, rows=np.arange(60))
    changed = (made != clean).any(dim=1).numpy()
    assert np.flatnonzero(changed).tolist() == drawn.microphones[drawn.microphones < 60].tolist()


def test_real_devices(tmp_path):
    dull = np.zeros(2000, dtype=np.float32)
    dull[:2] = 0.4  # sum of neighbours: 20 log10 cos(pi f / rate)
    write_audio(tmp_path / "dull.wav", dull)
    write_audio(tmp_path / "flat.wav", np.array([0.5] + [0.0] * 99))
    found = device_responses(tmp_path, 16000)
    hertz = np.geomspace(60, 8000, found.shape[1])
    expected = 20 * np.log10(np.maximum(np.cos(np.pi * hertz / 16000), 1e-9))
    assert np.abs(np.diff(found[0])[:-4] - np.diff(expected)[:-4]).max() < 0.5
    assert np.abs(found[1]).max() < 1e-3
    options = AugmentOptions(categories=[], microphone_probability=1.0, microphone_db=0.0)
    drawn = Augmenter({}, None, options, devices=found).draw(np.arange(50), 0)
    assert {tuple(row) for row in drawn.responses_db} == {tuple(row) for row in found}
    write_audio(tmp_path / "silent.wav", np.zeros(100))
    with pytest.raises(AudioError, match=r"silent\.wav: the impulse response is silent"):
        device_responses(tmp_path, 16000)


def test_every_probability_has_an_effect_and_words_in_the_log():
    names = [name for name in AugmentOptions.model_fields if name.endswith("_probability")]
    assert len(names) >= 3
    for name in names:
        options = AugmentOptions(**{name: 1.0})
        augmenter = Augmenter({}, None, options)
        assert augmenter.has_effect, name
        assert list(_describe_augmentation(augmenter, options)), name
