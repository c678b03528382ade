"""Compares each process's shard of a head with the whole head: loss, gradients, weights after
steps.

`tests/parallel/test_same_meaning.py` starts the two processes.
"""

import torch
from torch import nn

from speakernet.losses import LOSSES
from speakernet.losses.options import (
    AAMSoftmaxOptions,
    CombinedOptions,
    HAMSoftmaxOptions,
    SphereFace2Options,
    TripletOptions,
)
from speakernet.losses.sharded import shard as shard_classes
from speakernet.options import create
from speakernet.parallel.sharding import convert_state, parameters_of, share_of, total_norm

DIM = 6
CLASSES = 11
SPEAKERS = 5
UTTERANCES = 2
STEPS = 5

HEADS = [
    *(
        LOSSES[name].options()
        for name in ("softmax", "amsoftmax", "aamsoftmax", "sphereface2", "softmaxproto")
    ),
    AAMSoftmaxOptions(easy_margin=True, margin=0.4),
    AAMSoftmaxOptions(sub_centers=3),
    AAMSoftmaxOptions(inter_top_k=3, inter_top_k_penalty=0.1),
    AAMSoftmaxOptions(inter_top_k=50, sub_centers=2),
    SphereFace2Options(margin_type="A", margin=0.15),
    # At its usual scale the gradient's norm is 70 here, and steps of 0.1 would amplify rounding
    # errors.
    HAMSoftmaxOptions(scale=2.0),
    CombinedOptions(classification=AAMSoftmaxOptions(sub_centers=2), metric=TripletOptions()),
]


def loss_and_net(options):
    torch.manual_seed(1)
    loss = create(LOSSES[options.name], options, embedding_dim=DIM, num_classes=CLASSES, seed=0)
    return loss, nn.Linear(DIM, DIM)


def optimizer_over(net, loss):
    return torch.optim.SGD(
        [*net.parameters(), *loss.parameters()], lr=0.1, momentum=0.9, nesterov=True
    )


def batch_of(step):
    """(utterances, dim) and (utterances,); the two utterances of a speaker are adjacent."""
    generator = torch.Generator().manual_seed(step)
    speakers = torch.randperm(CLASSES, generator=generator)[:SPEAKERS]
    return torch.randn(
        (SPEAKERS * UTTERANCES, DIM), generator=generator
    ), speakers.repeat_interleave(UTTERANCES)


def loss_of(loss, embeddings, labels):
    if not loss.is_metric:
        return loss(embeddings, labels)
    return loss(embeddings.reshape(SPEAKERS, UTTERANCES, -1), labels[::UTTERANCES])


def compare(options, rank):
    """The largest differences between the shards and the whole head, by kind, and the size of this
    rank's shard.
    """
    whole, net = loss_and_net(options)
    shard, twin = loss_and_net(options)
    shard_classes(shard, rank, 2)
    assert shard.sees_all_ranks
    own = optimizer_over(net, whole)
    own_optimizer = optimizer_over(twin, shard)
    worst = dict.fromkeys(("loss", "accuracy", "norm", "embeddings", "weights", "moments"), 0.0)

    def note(name, left, right):
        # Relative to their size: a loss of 20 is rounded in its sixth digit, differently on each
        # processor.
        size = max(1.0, float(left.detach().abs().max()))
        worst[name] = max(worst[name], float((left - right).detach().abs().max()) / size)

    for step in range(STEPS):
        waveforms, labels = batch_of(step)
        results = []
        for loss, trunk, optimizer in ((whole, net, own), (shard, twin, own_optimizer)):
            embeddings = trunk(waveforms)
            embeddings.retain_grad()
            value, accuracy = loss_of(loss, embeddings, labels)
            value.backward()
            results.append((value, accuracy, embeddings.grad, total_norm(parameters_of(optimizer))))
            optimizer.step()
            optimizer.zero_grad()
        for name, left, right in zip(
            ("loss", "accuracy", "embeddings", "norm"), *results, strict=True
        ):
            note(name, left, right)
    # All ranks call it, and rank 0 gets the whole head.
    state = shard.state_dict()
    moments = convert_state(
        own_optimizer.state_dict()["state"], parameters_of(own_optimizer), to_whole=True
    )
    if rank == 0:
        for name, tensor in whole.state_dict().items():
            note("weights", tensor.float(), state[name].float())
        for number, saved in own.state_dict()["state"].items():
            note("moments", saved["momentum_buffer"], moments[number]["momentum_buffer"])
    for left, right in zip(net.parameters(), twin.parameters(), strict=True):
        note("weights", left, right)
    worst["rows"] = sum(
        len(parameter) for parameter in shard.parameters() if share_of(parameter) is not None
    )
    worst["loaded"] = float(_loads_into_shares(whole, options, own.state_dict()["state"], rank))
    return worst


def _loads_into_shares(whole, options, moments, rank):
    """Whether the state of a whole head, saved by one process, loads into this rank's shard and
    stays unchanged.
    """
    saved = whole.state_dict()
    before = {name: tensor.clone() for name, tensor in saved.items() if tensor.ndim}
    fresh, net = loss_and_net(options)
    shard_classes(fresh, rank, 2)
    fresh.load_state_dict(saved)
    parameters = parameters_of(optimizer_over(net, fresh))
    taken = convert_state(moments, parameters, to_whole=False)
    shards = [
        (name, parameter)
        for name, parameter in fresh.named_parameters()
        if share_of(parameter) is not None
    ]
    return (
        all(torch.equal(saved[name], tensor) for name, tensor in before.items())
        and all(
            torch.equal(parameter, share_of(parameter).take(whole.get_parameter(name)))
            for name, parameter in shards
        )
        and all(
            taken[number]["momentum_buffer"].shape == parameter.shape
            for number, parameter in enumerate(parameters)
        )
    )
