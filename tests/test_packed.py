"""Packed linear layers: the plain layer's numbers, and no second copy of the weights."""

import pytest
import torch
from torch import nn

from kvviz.models.packed import PackedLinear, can_pack, pack
from tests import tiny

pytestmark = pytest.mark.skipif(not can_pack(nn.Linear(2, 2)), reason="this build of torch has no oneDNN")


@pytest.mark.parametrize("rows", [(1,), (3, 1), (2, 33), (1, 300)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_plain_layer(rows, bias):
    plain = nn.Linear(96, 160, bias=bias).requires_grad_(False)
    packed, x = PackedLinear(plain), torch.randn(*rows, 96)
    torch.testing.assert_close(packed(x), plain(x), rtol=1e-4, atol=1e-5)
    assert torch.equal(packed.weight, plain.weight)


def test_a_packed_model_is_the_same_model():
    plain, packed = tiny.model(), tiny.model()
    pack(packed)
    assert not any(type(m) is nn.Linear for m in packed.modules())
    ids = torch.tensor([tiny.prompt_ids(40)])
    torch.testing.assert_close(packed(ids).logits, plain(ids).logits, rtol=1e-3, atol=1e-3)
    own = plain.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(packed.generate(ids, max_new_tokens=12, do_sample=False), own)


def test_only_float32_on_the_cpu_is_packed(tiny_engine, tiny_folder):
    import kvviz

    assert any(isinstance(m, PackedLinear) for m in tiny_engine("llama").model.modules())
    half = kvviz.load(tiny_folder(), device="cpu", dtype="bf16")
    assert not any(isinstance(m, PackedLinear) for m in half.model.modules())
