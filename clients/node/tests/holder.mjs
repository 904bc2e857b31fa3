// Holds a permit until it is killed: node holder.mjs URL ATTRIBUTES

import { Client } from '../index.mjs';

const [url, attributes] = process.argv.slice(2);
await new Client(url, { deadline: 20_000 }).withHold(JSON.parse(attributes), async () => {
  console.log('held');
  await new Promise((resolve) => setTimeout(resolve, 600_000));
});
