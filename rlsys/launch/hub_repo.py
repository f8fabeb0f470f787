"""Model repository on the Hugging Face Hub that an export is uploaded to. Imports `huggingface_hub` when it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlsys.errors import ConfigError, RlsysError


@dataclass(frozen=True, slots=True)
class HubRepo:
    """Repository that exists and, as far as the Hub says, may be written to."""

    repo_id: str
    """`org/name`."""

    @classmethod
    def open(cls, name: str, *, is_public: bool) -> HubRepo:
        """Create the repository `org/name`, private unless `is_public`, or take the one that exists.

        The token is that of HF_TOKEN or of `hf auth login`, and the server that of HF_ENDPOINT. Raises `ConfigError`
        for an invalid name, without a token, and for a public repository if `is_public` is False: an upload would
        publish the weights. Raises `RlsysError` if the Hub cannot be reached or refuses.
        """
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise ConfigError(f"--push {name}: not a name of the Hub: {error}; give org/name") from None
        if get_token() is None:
            raise ConfigError(f"--push {name}: there is no token; set HF_TOKEN, or log in with `hf auth login`")
        api = HfApi()
        with _refusals(name, "nothing is written yet"):
            repo_id = api.create_repo(name, private=not is_public, exist_ok=True).repo_id
            is_private = api.model_info(repo_id).private
        if not is_private and not is_public:
            raise ConfigError(
                f"--push {name}: it exists and is public; add --public to publish the weights, or give another name"
            )
        return cls(repo_id)

    def upload(self, folder: Path, message: str) -> str:
        """Add the files of `folder` as one commit; return the URL of the repository. Raises `RlsysError`."""
        from huggingface_hub import HfApi

        api = HfApi()
        remedy = f"the model is in {folder}; upload it with `hf upload {self.repo_id} {folder} .`"
        with _refusals(self.repo_id, remedy):
            api.upload_folder(repo_id=self.repo_id, folder_path=folder, commit_message=message)
        return f"{api.endpoint}/{self.repo_id}"


@contextmanager
def _refusals(name: str, remedy: str) -> Iterator[None]:
    """Turn an error of the Hub or of the connection into an `RlsysError` that ends with `remedy`."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        reason = "HF_HUB_OFFLINE is set, so the Hub is not asked: unset it"
        raise RlsysError(f"--push {name}: {reason}; {remedy}") from None
    except HfHubHTTPError as error:
        status, detail = error.response.status_code, error.server_message or str(error).partition("\n")[0]
        reason = {
            401: "the Hub does not know this token: renew it with `hf auth login`, or correct HF_TOKEN",
            403: "this token may not write there: the name belongs to others, or the token only reads",
        }.get(status, "the Hub refuses it")
        raise RlsysError(f"--push {name}: {reason} (HTTP {status}: {detail}); {remedy}") from None
    except (HTTPError, OSError) as error:
        raise RlsysError(
            f"--push {name}: the Hub cannot be reached: {error or type(error).__name__}; {remedy}"
        ) from None
