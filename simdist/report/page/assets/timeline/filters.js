// Which ranks: numbers and ranges as people write them.

/**
 * Return the sorted numbers that a text such as `0,3,8-11` names, all below `count` for an empty text.
 *
 * @throws {Error} It is no such list, or a number is not below `count`.
 */
function numbersOf(text, count, noun) {
  if (!text.trim()) return Array.from({ length: count }, (_, number) => number);
  const found = new Set();
  for (const part of text.split(",").map((each) => each.trim()).filter(Boolean)) {
    const match = /^(\d+)(?:\s*-\s*(\d+))?$/.exec(part);
    if (!match) throw new Error(`${noun} "${part}": write numbers and ranges, such as 0,3,8-11`);
    const [first, last] = [Number(match[1]), Number(match[2] ?? match[1])];
    if (last < first) throw new Error(`${noun} "${part}": the range ends before it begins`);
    if (last >= count) throw new Error(`${noun} ${last}: there are 0 to ${count - 1}`);
    for (let number = first; number <= last; number++) found.add(number);
  }
  return [...found].sort((a, b) => a - b);
}

/** Return the ranks that both fields let through; consecutive ranks share a node. */
function ranksOf(plan, ranksText, nodesText) {
  const ranks = numbersOf(ranksText, plan.worldSize, "rank");
  if (!plan.ranksPerNode || !nodesText.trim()) return ranks;
  const nodes = new Set(numbersOf(nodesText, Math.ceil(plan.worldSize / plan.ranksPerNode), "node"));
  const left = ranks.filter((rank) => nodes.has(Math.floor(rank / plan.ranksPerNode)));
  if (!left.length) throw new Error("none of these ranks is on these nodes");
  return left;
}
