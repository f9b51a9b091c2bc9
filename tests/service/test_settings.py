"""Flags over environment over defaults, and complaints that name what to change."""

from pathlib import Path
from typing import Any

import pytest

from service.errors import StartupError
from service.settings import Settings, environment_name, flag_name, load_settings


class TestNames:
    @pytest.mark.parametrize("setting", list(Settings.model_fields))
    def test_flag_and_variable_follow_from_the_setting(self, setting: str) -> None:
        """`max_queue_ms` is `--max-queue-ms` and `MHA_MAX_QUEUE_MS`, and so on for every setting."""
        assert flag_name(setting) == "--" + "-".join(setting.split("_"))
        assert environment_name(setting) == f"MHA_{setting.upper()}"

    @pytest.mark.parametrize("setting", list(Settings.model_fields))
    def test_has_a_description(self, setting: str) -> None:
        """Every setting says what it means, in a sentence."""
        description = Settings.model_fields[setting].description
        assert description is not None
        assert description.endswith(".")


class TestPrecedence:
    def test_defaults(self) -> None:
        """With nothing given, every value is its default and says so."""
        loaded = load_settings({}, {"PATH": "/bin", "MHA": "x", "XMHA_PORT": "1"})
        assert loaded.settings == Settings()
        assert set(loaded.origins.values()) == {"default"}
        assert list(loaded.origins) == list(Settings.model_fields)

    def test_flag_over_environment_over_default(self) -> None:
        """A flag wins over the environment, the environment over the default; each value knows its origin."""
        loaded = load_settings({"port": 1013}, {"MHA_PORT": "1019", "MHA_MAX_QUEUE_MS": "11"})
        settings, origins = loaded.settings, loaded.origins
        assert (settings.port, origins["port"]) == (1013, "flag")
        assert (settings.max_queue_ms, origins["max_queue_ms"]) == (11, "environment")
        assert (settings.workers, origins["workers"]) == (0, "default")

    def test_environment_is_read_as_the_settings_types(self) -> None:
        """Text of the environment becomes numbers, paths and choices."""
        environment = {"MHA_MODELS": "elsewhere", "MHA_DRAIN_DELAY_S": "0.7", "MHA_DEVICE": "cpu", "MHA_WORKERS": "3"}
        settings = load_settings({}, environment).settings
        assert settings.models == Path("elsewhere")
        assert (settings.drain_delay_s, settings.device, settings.workers) == (0.7, "cpu", 3)

    def test_cannot_be_changed(self) -> None:
        """Settings are what they were at the start."""
        with pytest.raises(ValueError, match="frozen"):
            Settings().port = 7  # type: ignore[misc]


class TestUnknownVariable:
    @pytest.mark.parametrize(
        ("name", "nearest"),
        [
            pytest.param("MHA_PROT", "MHA_PORT", id="letters_swapped"),
            pytest.param("MHA_MAX_BODY", "MHA_MAX_BODY_BYTES", id="cut_short"),
            pytest.param("MHA_TIMEOUT_S", "MHA_TIMEOUT_MS", id="another_unit"),
            pytest.param("MHA_port", "MHA_PORT", id="lower_case"),
        ],
    )
    def test_names_the_nearest(self, name: str, nearest: str) -> None:
        """An `MHA_*` variable that is no setting stops the start and names the nearest that is one."""
        with pytest.raises(StartupError, match=f"^{name}: no such setting; the nearest is {nearest} "):
            load_settings({}, {name: "1"})

    @pytest.mark.parametrize("name", ["MHA_", "MHA_ZZZZZZ"], ids=["bare_prefix", "like_nothing"])
    def test_always_names_one(self, name: str) -> None:
        """Some setting is the nearest even to what resembles none."""
        with pytest.raises(StartupError, match=f"^{name}: no such setting; the nearest is MHA_[A-Z0-9_]+ "):
            load_settings({}, {name: "1"})


BAD_VALUES = [
    pytest.param("port", 65_537, "less than or equal to 65535", id="port_too_large"),
    pytest.param("port", -1, "greater than or equal to 0", id="port_negative"),
    pytest.param("port", "http", "valid integer", id="port_no_number"),
    pytest.param("device", "tpu", "'auto', 'cpu' or 'cuda'", id="device"),
    pytest.param("workers", -1, "greater than or equal to 0", id="workers"),
    pytest.param("threads_per_call", -1, "greater than or equal to 0", id="threads_per_call"),
    pytest.param("max_queue_ms", -1, "greater than or equal to 0", id="max_queue_ms"),
    pytest.param("max_queue_bytes", 0, "greater than or equal to 1", id="max_queue_bytes"),
    pytest.param("max_answer_bytes", 0, "greater than or equal to 1", id="max_answer_bytes"),
    pytest.param("max_body_bytes", 0, "greater than or equal to 1", id="max_body_bytes"),
    pytest.param("max_connections", 0, "greater than or equal to 1", id="max_connections"),
    pytest.param("max_head_bytes", 255, "greater than or equal to 256", id="max_head_bytes"),
    pytest.param("head_timeout_s", 0, "greater than 0", id="head_timeout_s"),
    pytest.param("min_body_rate", -1, "greater than or equal to 0", id="min_body_rate"),
    pytest.param("keep_alive_s", -1, "greater than or equal to 0", id="keep_alive_s"),
    pytest.param("timeout_ms", 0, "greater than or equal to 1", id="timeout_ms"),
    pytest.param("timeout_ms", 2.5, "integer", id="timeout_ms_fraction"),
    pytest.param("drain_delay_s", -0.1, "greater than or equal to 0", id="drain_delay_s"),
    pytest.param("drain_delay_s", "inf", "finite", id="drain_delay_s_infinite"),
    pytest.param("drain_timeout_s", "inf", "finite", id="drain_timeout_s_infinite"),
    pytest.param("drain_timeout_s", "nan", "finite", id="drain_timeout_s_nan"),
    pytest.param("log_level", "loud", "'debug', 'info', 'warning' or 'error'", id="log_level"),
    pytest.param("log_format", "xml", "'auto', 'json' or 'console'", id="log_format"),
]


class TestBadValue:
    @pytest.mark.parametrize(("setting", "value", "want"), BAD_VALUES)
    def test_of_a_flag_names_the_flag(self, setting: str, value: Any, want: str) -> None:
        """A flag's bad value is complained about as the flag, with what was got and what is wanted."""
        with pytest.raises(StartupError) as caught:
            load_settings({setting: value}, {})
        assert str(caught.value).startswith(f"{flag_name(setting)}: got {value!r}: ")
        assert want in str(caught.value)

    @pytest.mark.parametrize(("setting", "value", "want"), BAD_VALUES)
    def test_of_a_variable_names_the_variable(self, setting: str, value: Any, want: str) -> None:
        """A variable's bad value is complained about as the variable, even if other flags are given."""
        with pytest.raises(StartupError) as caught:
            load_settings({"host": "::1"}, {environment_name(setting): str(value)})
        assert str(caught.value).startswith(f"{environment_name(setting)}: got {str(value)!r}: ")
        assert want in str(caught.value)

    def test_of_a_variable_that_a_flag_overrides_does_no_harm(self) -> None:
        """What a flag overrides is not judged."""
        assert load_settings({"port": 1013}, {"MHA_PORT": "http"}).settings.port == 1013


def test_empty_variable_is_as_good_as_none() -> None:
    """A variable that is set and empty, as compose files leave them, means the default."""
    loaded = load_settings({}, {"MHA_API_KEYS_FILE": "", "MHA_PORT": ""})
    assert loaded.settings.api_keys_file is None
    assert loaded.origins["port"] == "default"
