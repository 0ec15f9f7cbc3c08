// A machine that is busy with other tests makes the server shed: such checks pass undecided, without RateLimit fields.
// Asks again until they are decided, so that the tests see decisions.
const ask = globalThis.fetch;
const deadline = Date.now() + 60_000;

globalThis.fetch = async function (input, init) {
  const again = input instanceof Request ? input.clone() : input;
  const answer = await ask(input, init);
  const isCheck = /imit$/.test(new URL(answer.url).pathname);
  const isShed = isCheck && answer.status === 200 && !answer.headers.has("ratelimit");
  return isShed && Date.now() < deadline ? globalThis.fetch(again, init) : answer;
};
